"""Recording changes nothing of training, and what is recorded gives the step again. Real training, on the CPU."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from launch import TINY, launch, trained

from megatron_balance.diagnosis.diagnose import recorded_split
from megatron_balance.diagnosis.fix import FREE, proposals
from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD, TRANSFERS, Trace

pytestmark = pytest.mark.training

MODEL = "--num-layers 4"
PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "processes"),
    [(PP2, 2), (PP2, 4), (f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 2)],
    ids=["PP2", "DP2-PP2", "PP2-VPP2"],
)
def test_losses_are_the_same_and_all_operations_are_there(from_checkpoint, tmp_path, flags, processes):
    trace = f"--straggler-trace {tmp_path / 'trace'} --straggler-trace-interval 6"
    recorded = from_checkpoint(MODEL, f"{flags} {trace}", processes)
    assert recorded.losses == from_checkpoint(MODEL, flags, processes).losses
    assert "warning: --straggler-trace" not in recorded.output and "last stage" in recorded.output
    assert len(list((tmp_path / "trace").iterdir())) == processes
    read = read_trace(tmp_path / "trace")
    topology = read.job.topology
    assert read.steps.tolist() == list(range(1, 21))
    for kind in (FORWARD, BACKWARD):
        passes = read.kind == read.kinds.index(kind)
        assert passes.sum() == 20 * topology.data_size * topology.num_stages * topology.num_microbatches
    assert read.sequences.tokens.min() == read.sequences.tokens.max() == 32
    assert read.problems == () and read.job.in_turn
    within_s, first = read.embedding_s, (read.pp_rank == 0) & (read.chunk == 0) & (read.microbatch >= 0)
    passes = np.isin(read.kind, [read.kinds.index(kind) for kind in (FORWARD, BACKWARD)])
    assert np.isfinite(within_s).tolist() == (first & passes).tolist()
    assert (within_s[first & passes] > 0).all() and (within_s < read.end_s - read.start_s)[first & passes].all()
    assert gives_the_steps_again(Replay(read)) <= 1e-5


def gives_the_steps_again(replay: Replay) -> float:
    """Most seconds by which an operation ends elsewhere in the replay than it did; of one call's transfers the last counts."""
    others = ~np.isin(np.array(replay.nodes.kinds)[replay.nodes.kind], TRANSFERS)
    apart_s = replay.moments().end_s - (replay.end_s - replay.began_s[:, None, None])
    return float(np.abs(apart_s[:, others]).max())


@pytest.mark.parametrize("processes", [2, 4], ids=["PP2", "DP2-PP2"])
def test_the_line_in_the_log_says_what_diagnose_says_of_these_steps(tmp_path, processes):
    trace = f"--straggler-trace {tmp_path / 'trace'} --straggler-trace-steps 5:15 --num-layers 6"
    larger = f"--hidden-size 64 --vocab-size 32767 --untie-embeddings-and-output-weights {PP2}"
    run = trained(launch(tmp_path, [*TINY, *larger.split(), *trace.split()], processes))
    read = read_trace(tmp_path / "trace")
    assert read.steps.tolist() == list(range(5, 15))
    (line,) = re.findall("^megatron-balance: iteration 14: (.*)", run.output, re.MULTILINE)
    last, head, layers, saving = re.match(
        r"last stage ([\d.]+)x the mean; head = ([\d.]+) layers(?:; \(([\d,]+)\) would save (\d+) %, memory aside)?",
        line,
    ).groups()
    split = recorded_split(read, read.job.layers)
    busy_s, costs, best = split.signals.typical_s.sum(axis=0), split.costs, proposals(split)[FREE]
    assert float(last) == pytest.approx(busy_s[-1] / busy_s.mean(), abs=0.006)
    assert float(head) == pytest.approx(costs.head.total_s / costs.mean_layer.total_s, abs=0.06)
    gain = (split.simulated_s(read.job.layers) - split.simulated_s(best)) / longest_step_s(read)
    if layers is None:  # on a machine where the layers happened to take as long as the head
        assert gain < 0.0101
    else:
        assert layers == ",".join(map(str, best)) and float(saving) == pytest.approx(100 * gain, abs=0.51)


def longest_step_s(trace: Trace) -> float:
    """Median seconds of a step on the rank where it takes longest, as the line in the log has it.

    A step as diagnosed goes from the last end on any rank to the next, which on a busy machine is another by some per cent.
    """
    medians_s = []
    for rank in {*zip(trace.dp_rank.tolist(), trace.pp_rank.tolist(), strict=True)}:
        own = (trace.dp_rank == rank[0]) & (trace.pp_rank == rank[1])
        of_steps = [own & (trace.step == step) for step in trace.steps]
        medians_s.append(np.median([np.ptp([*trace.start_s[rows], *trace.end_s[rows]]) for rows in of_steps]))
    return max(medians_s)


def test_a_job_trains_on_the_plan_that_the_trace_of_an_earlier_one_gives(from_checkpoint, tmp_path):
    model = "--num-layers 6 --hidden-size 64 --vocab-size 32767 --untie-embeddings-and-output-weights"
    trace, plan_file = tmp_path / "trace", tmp_path / "plan.json"
    recorded = from_checkpoint(model, f"{PP2} --straggler-trace {trace}", 2)
    balanced = f"--balanced-pipeline --balanced-pipeline-costs {trace} --balanced-pipeline-plan {plan_file}"
    planned = from_checkpoint(model, f"{PP2} {balanced}", 2)
    assert planned.losses == pytest.approx(recorded.losses, rel=2e-6)
    read = read_trace(trace)
    split, plan = recorded_split(read, read.job.layers), json.loads(plan_file.read_text())
    assert plan["costs_source"] == split.table().source
    assert plan["head_in_layers"] == pytest.approx(split.costs.in_layers(split.costs.head))
    layers = [stage["layers"] for stage in plan["stages"]]
    assert layers[0] > layers[1] and sum(layers) == 6
    stages = {rank["pipeline_rank"]: len(rank["chunks"][0]["layers"]) for rank in planned.ranks.values()}
    assert stages == dict(enumerate(layers))


FAULTY = """
import os, sys
from megatron_balance import run
from megatron_balance.megatron.observer import observe
def ready():
    from megatron_balance.megatron.recorder.marks import ProcessMarks
    made = ProcessMarks.__init__
    def broken(self):
        made(self)
        left, mark = [500], self.mark
        def counted():
            left[0] -= 1
            if left[0] < 0 and os.environ["RANK"] == "1":
                raise RuntimeError("no event")
            return mark()
        self.mark = counted
    ProcessMarks.__init__ = broken
folder, *arguments = sys.argv[1:]
run.main(arguments, ready=lambda: (observe(folder), ready()))
"""


def test_an_event_that_fails_ends_the_recording_of_a_rank_and_changes_no_loss(from_checkpoint, checkpoint, tmp_path):
    driver = tmp_path / "faulty.py"
    driver.write_text(FAULTY)
    load = f"--load {checkpoint(MODEL)} --finetune --no-load-optim --no-load-rng --straggler-trace {tmp_path / 'trace'}"
    given = [*TINY, *MODEL.split(), *PP2.split(), *load.split(), "--straggler-trace-interval", "4"]
    run = trained(launch(tmp_path, given, 2, driver=driver))
    assert run.losses == from_checkpoint(MODEL, PP2, 2).losses
    assert (
        run.output.count("warning: --straggler-trace: recording ends, training goes on (RuntimeError: no event)") == 1
    )
    steps = read_trace(tmp_path / "trace").steps
    assert 4 <= steps.size < 20 and steps.size % 4 == 0


def test_a_killed_job_leaves_what_it_wrote(tmp_path):
    trace = f"--straggler-trace {tmp_path / 'trace'} --straggler-trace-interval 4"
    given = [*TINY, *MODEL.split(), *PP2.split(), *trace.split(), "--train-iters", "10000"]
    assert launch(tmp_path, given, 2, kill_when="iteration       14/").status < 0
    assert {*range(1, 13)} <= {*read_trace(tmp_path / "trace").steps.tolist()}


LIMITED = """
import resource, signal, sys
from megatron_balance import run
def ready():
    from megatron_balance.megatron.recorder.parts import Parts
    write = Parts.write
    def limited(self, rows):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.bytes:  # the disk is full from the second part on
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        try:
            write(self, rows)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Parts.write = limited
from megatron_balance.megatron.observer import observe
folder, *arguments = sys.argv[1:]
run.main(arguments, ready=lambda: (observe(folder), ready()))
"""


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path):
    driver = tmp_path / "limited.py"
    driver.write_text(LIMITED)
    trace = f"--straggler-trace {tmp_path / 'trace'} --straggler-trace-interval 4"
    run = trained(launch(tmp_path, [*TINY, *MODEL.split(), *trace.split()], 1, driver=driver))
    assert len(run.losses) == 20
    assert run.output.count("warning: --straggler-trace: recording ends, training goes on (OSError") == 1
    assert read_trace(tmp_path / "trace").steps.tolist() == [1, 2, 3, 4]
