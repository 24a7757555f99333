"""Recording changes nothing of training, and what is recorded gives the step again. Real training, on the CPU."""

from __future__ import annotations

import pytest
from launch import TINY, launch, trained

from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD

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
        if self.bytes:  # the disk is full from the second part on
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            write(self, rows)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
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
