"""The order of operations against Megatron's own schedules, and the simulator against a plain one."""

from __future__ import annotations

import errno
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import kernels
from megatron_balance.errors import BalanceError
from megatron_balance.schedule.order import Order, schedule_order
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

LEGAL = [
    Topology(1, 5),
    Topology(2, 1),
    Topology(2, 6),
    Topology(4, 3),
    Topology(4, 13),
    Topology(8, 8),
    Topology(2, 2, 2),
    Topology(2, 8, 2),
    Topology(2, 8, 3),
    Topology(2, 5, 2, microbatch_group_size=3),
    Topology(3, 9, 4),
    Topology(4, 4, 4),
    Topology(4, 8, 2),
    Topology(4, 12, 3, microbatch_group_size=6),
    Topology(4, 10, 2, microbatch_group_size=6),
    Topology(4, 9, 2, microbatch_group_size=9),
    Topology(8, 16, 5),
    Topology(1, 1, overlap_moe=True),
    Topology(1, 5, overlap_moe=True),
    Topology(2, 2, 2, overlap_moe=True),
    Topology(2, 5, 2, microbatch_group_size=3, overlap_moe=True),
    Topology(3, 9, 4, overlap_moe=True),
    Topology(4, 4, 4, overlap_moe=True),
    Topology(4, 10, 2, microbatch_group_size=6, overlap_moe=True),
    Topology(8, 16, 5, overlap_moe=True),
]
REFUSED = [
    Topology(4, 3, 2),
    Topology(4, 6, 2),
    Topology(4, 8, 2, microbatch_group_size=3),
    Topology(4, 8, 2, microbatch_group_size=9),
    Topology(4, 9, 2, microbatch_group_size=6),
]


def describe(topology: Topology) -> str:
    sizes = f"PP{topology.pipeline_size}-V{topology.virtual_size}-M{topology.num_microbatches}-g{topology.group_size}"
    return f"{sizes}-overlap" if topology.overlap_moe else sizes


def sequence(order: Order, rank: int) -> list[tuple[str, int, int]]:
    """Kind (``f`` is a forward pass that runs as one with what follows), chunk and micro-batch of each pass."""
    return [
        ("B" if is_backward else "f" if combined else "F", int(chunk), int(microbatch))
        for is_backward, combined, chunk, microbatch in zip(
            order.is_backward[rank], order.combined[rank], order.chunk[rank], order.microbatch[rank], strict=True
        )
    ]


# --- the order, as recorded from Megatron


class RecordedMegatron:
    """Megatron's real schedule functions, with the passes and the communication replaced by stand-ins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        self.schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
        self.torch = torch
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
        monkeypatch.setattr(self.schedules, "forward_step", self.forward_step)
        monkeypatch.setattr(self.schedules, "backward_step", self.backward_step)
        combined = pytest.importorskip("megatron.core.pipeline_parallel.combined_1f1b")
        monkeypatch.setattr(combined, "combined_forward_backward_step", self.combined_step)
        monkeypatch.setattr(combined, "set_streams", lambda *args, **options: None)  # of a GPU
        self.passes: list[tuple[str, int, int]] = []

    def forward_step(self, *args, current_microbatch: int, vp_stage: int | None = None, **kwargs):
        self.passes.append(("F", vp_stage or 0, current_microbatch))
        return self.passes[-1], 0

    def backward_step(self, input_tensor, output_tensor, *args, **kwargs):
        self.passes.append(("B", *output_tensor[1:]))

    def combined_step(
        self, step, data, f_model, microbatches, received, store, b_model, b_input, b_output, *args,
        f_model_chunk_id: int | None = None, current_microbatch: int | None = None, **kwargs,
    ):  # fmt: skip
        output = None
        if f_model is not None:
            output = ("F" if b_model is None else "f", f_model_chunk_id or 0, current_microbatch)
            self.passes.append(output)
        if b_model is not None:
            self.passes.append(("B", *b_output[1:]))
        return output, 0, "gradient"

    def run(self, topology: Topology, rank: int) -> list[tuple[str, int, int]]:
        """The passes of one rank in one training step."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.passes = []
        interleaved = topology.virtual_size > 1
        config = self._config(topology)
        chunks = [self.torch.nn.Module() for _ in range(topology.virtual_size)]
        for chunk in chunks:
            chunk.config, chunk.model_type = config, None
        if topology.pipeline_size == 1:
            schedule = self.schedules.forward_backward_no_pipelining
        elif interleaved:
            schedule = self.schedules.forward_backward_pipelining_with_interleaving
        else:
            schedule = self.schedules.forward_backward_pipelining_without_interleaving
        groups = ProcessGroupCollection()
        for name in ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "tp_dp_cp"):
            setattr(groups, name, SimpleNamespace(size=lambda: 1, rank=lambda: 0))
        schedule(
            forward_step_func=None,
            data_iterator=[None] * len(chunks) if interleaved else None,
            model=chunks if interleaved else chunks[0],
            num_microbatches=topology.num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=Communicator(topology, rank, config),
            pg_collection=groups,
        )
        return self.passes

    def _config(self, topology: Topology):
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=topology.num_stages,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=topology.pipeline_size,
            virtual_pipeline_model_parallel_size=topology.virtual_size if topology.virtual_size > 1 else None,
            microbatch_group_size_per_vp_stage=topology.group_size,
            pipeline_dtype=self.torch.float32,
            deallocate_pipeline_outputs=False,
        )
        config.overlap_moe_expert_parallel_comm = topology.overlap_moe  # the constructor wants experts for it
        return config


class Communicator:
    """Delivers at once whatever is asked for; only the order of the passes is looked at."""

    def __init__(self, topology: Topology, rank: int, config) -> None:
        self.config = config
        self.pp_group = SimpleNamespace(size=lambda: topology.pipeline_size, rank=lambda: rank)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self.total_stages, self.current_stage = topology.pipeline_size, rank
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == topology.pipeline_size - 1

    def _deliver(self, *args, **kwargs) -> str:
        return "tensor"

    recv_forward = recv_backward = send_forward = send_backward = _deliver
    send_forward_recv_backward = send_backward_recv_forward = _deliver
    send_forward_recv_forward = send_backward_recv_backward = _deliver

    def send_forward_backward_recv_forward_backward(self, *args, **kwargs) -> tuple[str, str]:
        return "tensor", "tensor"


@pytest.mark.megatron
@pytest.mark.parametrize("topology", LEGAL, ids=describe)
def test_order_is_what_megatron_runs(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = RecordedMegatron(monkeypatch)
    order = schedule_order(topology)
    for rank in range(topology.pipeline_size):
        assert sequence(order, rank) == megatron.run(topology, rank)


@pytest.mark.megatron
@pytest.mark.parametrize("topology", REFUSED, ids=describe)
def test_refuses_what_megatron_refuses(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, RuntimeError), match="micro-batches"):
        RecordedMegatron(monkeypatch).run(topology, 0)
    with pytest.raises(BalanceError, match=rf"{topology.num_microbatches}\b.*micro-batches"):
        schedule_order(topology)


# --- the order by itself


def test_order_of_1f1b_by_hand() -> None:
    order = schedule_order(Topology(2, 3))
    assert sequence(order, 0) == [
        ("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2),
    ]  # fmt: skip
    assert sequence(order, 1) == [
        ("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1), ("F", 0, 2), ("B", 0, 2),
    ]  # fmt: skip


def test_virtual_stages_without_a_pipeline_are_refused() -> None:
    with pytest.raises(BalanceError, match="at least 2 pipeline ranks"):
        schedule_order(Topology(1, 4, 2))


def test_overlap_without_virtual_stages_is_refused() -> None:
    with pytest.raises(BalanceError, match="needs virtual stages on 4 pipeline ranks"):
        schedule_order(Topology(4, 8, overlap_moe=True))


def test_too_few_microbatches_say_which_global_batch_size_does() -> None:
    with pytest.raises(BalanceError, match=r"3 micro-batches and 4 ranks; raise --global-batch-size to at least 16"):
        schedule_order(Topology(4, 3, 2, micro_batch_size=2, data_size=2))


# --- the simulator


def plain_simulation(topology: Topology, forward_s: np.ndarray, backward_s: np.ndarray, p2p_s: float) -> float:
    """Event by event, by the definition: an operation runs when its rank is free and its input has arrived.

    What a combined forward pass computes leaves when the backward pass behind it has ended.
    """
    ranks, stages = topology.pipeline_size, topology.num_stages
    order = schedule_order(topology)
    queues = [sequence(order, rank) for rank in range(ranks)]
    free, ended, held = [0.0] * ranks, {}, [[] for _ in range(ranks)]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                kind, chunk, microbatch = queue[0]
                stage = chunk * topology.pipeline_size + rank
                source = stage + 1 if kind == "B" else stage - 1
                if source in (-1, stages):
                    arrival = 0.0
                elif (kind.upper(), source, microbatch) in ended:
                    arrival = ended[kind.upper(), source, microbatch] + p2p_s
                else:
                    break
                seconds = (backward_s if kind == "B" else forward_s)[stage, microbatch]
                free[rank] = max(free[rank], arrival) + seconds
                held[rank].append((kind.upper(), stage, microbatch))
                if kind != "f":
                    ended.update(dict.fromkeys(held[rank], free[rank]))
                    held[rank].clear()
                queue.pop(0)
    return max(free)


@st.composite
def small_topologies(draw: st.DrawFn) -> Topology:
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if ranks > 1 else 1
    group = ranks + draw(st.integers(0, 2))
    groups = draw(st.integers(1, 3))
    microbatches = group * groups if chunks > 1 else draw(st.integers(1, 10))
    overlap = (chunks > 1 or ranks == 1) and draw(st.booleans())
    return Topology(ranks, microbatches, chunks, microbatch_group_size=group, overlap_moe=overlap)


@settings(max_examples=60, deadline=None)
@given(small_topologies(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]))
def test_agrees_with_a_plain_simulation(topology: Topology, seed: int, p2p_s: float) -> None:
    shape = (2, topology.num_stages, topology.num_microbatches)
    forward_s, backward_s = np.random.default_rng(seed).uniform(0.0, 2.0, shape)
    simulator = Simulator(topology, p2p_s)
    step_s = plain_simulation(topology, forward_s, backward_s, p2p_s)
    assert simulator.step_s(forward_s, backward_s) == pytest.approx(step_s)

    timeline = simulator.timeline(forward_s, backward_s)
    assert timeline.step_s == pytest.approx(step_s)
    assert (timeline.start_s[:, 1:] >= timeline.end_s[:, :-1] - 1e-9).all()
    by_rank = (forward_s + backward_s).sum(axis=1).reshape(topology.virtual_size, -1).sum(axis=0)
    assert timeline.busy_s == pytest.approx(by_rank)
    assert timeline.bubble == pytest.approx(1 - by_rank.sum() / (topology.pipeline_size * step_s), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(small_topologies(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3]))
def test_critical_path_adds_up_to_the_step(topology: Topology, seed: int, p2p_s: float) -> None:
    shape = (2, topology.num_stages)
    timeline = Simulator(topology, p2p_s).timeline(*np.random.default_rng(seed).uniform(0.0, 2.0, shape))
    start_s, end_s = timeline.start_s[timeline.critical], timeline.end_s[timeline.critical]
    path = np.argsort(end_s)
    start_s, end_s = start_s[path], end_s[path]
    assert start_s[0] == pytest.approx(0.0)
    assert end_s[-1] == pytest.approx(timeline.step_s)
    waits = start_s[1:] - end_s[:-1]
    assert all(wait == pytest.approx(0.0) or wait == pytest.approx(p2p_s) for wait in waits)


@pytest.mark.parametrize("topology", [t for t in LEGAL if t.num_microbatches % t.group_size == 0], ids=describe)
def test_even_stages_give_the_textbook_bubble(topology: Topology) -> None:
    stages = topology.num_stages
    step_s = Simulator(topology).step_s(np.full(stages, 1.0), np.full(stages, 2.0))
    passes = topology.num_microbatches * topology.virtual_size + topology.pipeline_size - 1
    assert step_s == pytest.approx(3.0 * passes)


def test_equal_microbatches_may_be_given_once() -> None:
    topology = Topology(4, 8, 2)
    forward_s, backward_s = np.random.default_rng(0).uniform(size=(2, 8))
    simulator = Simulator(topology)
    each = [np.repeat(costs[:, None], 8, axis=1) for costs in (forward_s, backward_s)]
    assert simulator.step_s(*each) == simulator.step_s(forward_s, backward_s)


def test_costs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[4\] or \[4, 8\] needed, not \(3,\)"):
        Simulator(Topology(4, 8)).step_s(np.ones(3), np.ones(3))


@pytest.mark.parametrize("p2p_s", [-1.0, float("nan"), float("inf")])
def test_transfer_times_are_checked(p2p_s: float) -> None:
    with pytest.raises(BalanceError, match="transfer"):
        Simulator(Topology(4, 8), p2p_s)


def test_kernels_compile_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.numba.njit

    def njit(kernel=None, *, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(kernel)

    monkeypatch.setattr(kernels.numba, "njit", njit)
    assert kernels.compiled(lambda number: number + 1)(1) == 2


def test_kernels_run_where_their_code_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """As on a full disk: an empty file can be made there, which is all that Numba asks beforehand."""
    monkeypatch.setattr(kernels.numba.config, "CACHE_DIR", str(tmp_path))
    kernel = kernels.compiled(kernels.run_program.py_func)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("load_overload", "save_overload"):
        monkeypatch.setattr(kernel._cache._cache, name, full)
    nothing = np.zeros(1, dtype=np.int32)
    program = kernels.Program(*[nothing] * 3, nothing + 1, nothing)
    assert kernel(program, np.array([2.5]), 0.0, np.zeros(1), np.zeros(2)) == 2.5


def test_neither_torch_nor_megatron_is_imported() -> None:
    code = (
        "import sys; import megatron_balance.pipeline.plan, megatron_balance.pipeline.show; "
        "sys.exit(any(name.split('.')[0] in ('torch', 'megatron') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
