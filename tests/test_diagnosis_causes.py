"""What diagnosis names: the public traces' known causes, what is injected into them, and jobs of which little can be said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import traces

from megatron_balance.costs.table import load_costs, save_costs
from megatron_balance.diagnosis.diagnose import diagnose, recorded_split
from megatron_balance.diagnosis.fix import FREE, WITHIN
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import (
    CAUSES,
    COMMUNICATION,
    GARBAGE,
    HEALTHY,
    NO,
    SEQUENCE_LENGTHS,
    STAGE_SPLIT,
    UNKNOWN,
    UNNAMED,
    WORKER,
    YES,
    Diagnosis,
)
from megatron_balance.diagnosis.signals import signals_of
from megatron_balance.diagnosis.trace import Sequences, Trace
from megatron_balance.errors import BalanceError
from megatron_balance.model import ModelSpec
from megatron_balance.packing.cost import SequenceCost
from megatron_balance.topology import Topology

SMALL = Topology(4, 8, data_size=4)
STEPS = 6
FACTORS = (1.0, 1.2, 1.6, 2.0, 2.5, 3.5)


@pytest.fixture(scope="module")
def st() -> Trace:
    return traces.public_trace("ST")


@pytest.fixture(scope="module")
def se() -> Trace:
    return traces.public_trace("SE")


def made(
    topology: Topology,
    seed: int = 0,
    stage: np.ndarray | float = 1.0,
    extra_s: np.ndarray | float = 0.0,
    steps: int = STEPS,
) -> Trace:
    """Passes of 10 and 20 ms times ``stage``, with ``extra_s`` once forward and twice backward, and 1 % of noise."""
    shape = (steps, topology.data_size, topology.num_stages, topology.num_microbatches)
    noise = 1.0 + 0.01 * np.random.default_rng(seed).standard_normal((2, *shape))
    scale = np.broadcast_to(np.asarray(stage, dtype=float), (topology.num_stages,))[:, None]
    return traces.made_trace(topology, (0.01 * scale + extra_s) * noise[0], (0.02 * scale + 2 * extra_s) * noise[1])


def lengths_s(topology: Topology, seed: int, steps: int = STEPS) -> tuple[np.ndarray, Sequences]:
    """Seconds that long sequences add to a forward pass, [steps, DP, 1, M], and the lengths."""
    longest = np.random.default_rng(seed).lognormal(0.0, 0.8, (steps, topology.data_size, 1, topology.num_microbatches))
    extra_s = 0.004 * longest**2
    tokens = np.full((steps, topology.num_microbatches, topology.data_size), 8192)
    by_rank = (1000 * longest[:, :, 0]).astype(int).transpose(0, 2, 1)
    return extra_s, Sequences(tokens, by_rank, by_rank**2)


def answers(found: Diagnosis, cause: str) -> list[str]:
    return [check.answer for check in found.checklist if check.cause == cause]


# --- the published traces


def test_the_stage_split_is_named_with_what_the_last_stage_takes(st: Trace) -> None:
    found = diagnose(st, layers=(9,) * 4)
    assert found.verdict == (STAGE_SPLIT,)
    assert found.worker is None
    forward, backward = signals_of(Replay(st)).median_s
    assert forward[-1] / forward[:-1].mean() == pytest.approx(2.07, abs=0.01)
    assert backward[-1] / backward[:-1].mean() == pytest.approx(1.41, abs=0.01)
    assert "2.07x forward" in found.checklist[0].measured
    assert answers(found, STAGE_SPLIT) == [YES] * 5
    assert YES not in answers(found, SEQUENCE_LENGTHS)


def test_sequence_lengths_come_before_the_stage_split(se: Trace) -> None:
    found = diagnose(se)
    assert found.verdict == (SEQUENCE_LENGTHS, STAGE_SPLIT)
    assert answers(found, SEQUENCE_LENGTHS) == [UNKNOWN, YES, UNKNOWN, UNKNOWN, YES, YES]
    assert sum(found.causes.values()) == pytest.approx(1.0, abs=0.02)  # next to nothing is left without a name
    assert found.fixes[0].flags == ("--varlen-packing", "--calculate-per-token-loss")


def test_splits_gain_what_the_study_of_the_trace_says(st: Trace) -> None:
    split = recorded_split(st, (9,) * 4)
    assert 0.095 <= split.step_s / split.step_with_s((10, 10, 10, 6)) - 1 <= 0.115
    gains = {fix.memory: fix.gain for fix in diagnose(st, layers=(9,) * 4).fixes}
    assert gains[WITHIN] >= 0.13
    assert gains[FREE] >= 0.185


def test_without_layers_no_split_is_proposed(st: Trace) -> None:
    (fix,) = diagnose(st).fixes
    assert fix.cause == STAGE_SPLIT
    assert "--layers" in fix.note
    with pytest.raises(BalanceError, match="3 stages, the trace has 4"):
        diagnose(st, layers=(12, 12, 12))


# --- what is injected


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_a_levelled_trace_is_healthy(name: str) -> None:
    trace = traces.public_trace(name)
    for seed in (0, 1):
        found = diagnose(traces.levelled(trace, noise=0.02, seed=seed))
        assert found.verdict == (HEALTHY,)
        assert found.fixes == ()
        assert found.worker is None
        assert YES not in answers(found, WORKER) + answers(found, GARBAGE) + answers(found, COMMUNICATION)


@pytest.mark.parametrize("wanted", [1.16, 1.40, 2.03])
@pytest.mark.parametrize("name", ["ST", "SE"])
def test_a_slow_worker_is_named_with_the_slowdown_that_it_makes(name: str, wanted: float) -> None:
    clean, base_s, slowdowns = levelled_and_slowed(name)
    place = (1, 1)
    slow = traces.slowed(clean, *place, np.interp(wanted, slowdowns, FACTORS))
    assert Replay(slow).recorded_step_s.mean() / base_s == pytest.approx(wanted, rel=0.02)
    found = diagnose(slow)
    assert found.verdict == (WORKER,)
    assert found.worker == place
    assert found.by_cause[WORKER] == pytest.approx(wanted, rel=0.05)
    assert found.causes[WORKER] > 0.9
    assert found.causes[SEQUENCE_LENGTHS] < 0.02


@cache
def levelled_and_slowed(name: str) -> tuple[Trace, float, list[float]]:
    """A levelled trace, its mean step, and by what that grows with one worker slower by each of ``FACTORS``."""
    clean = traces.levelled(traces.public_trace(name), noise=0.02)
    base_s = Replay(clean).recorded_step_s.mean()
    slowed = [Replay(traces.slowed(clean, 1, 1, factor)).recorded_step_s.mean() / base_s for factor in FACTORS]
    return clean, base_s, slowed


@pytest.mark.parametrize("name", ["ST", "SE"])
def test_a_slow_worker_is_told_from_what_slows_the_job_besides(name: str) -> None:
    slow = diagnose(traces.slowed(traces.public_trace(name), 0, 1, 2.5))
    assert slow.worker == (0, 1)
    assert slow.verdict[0] == WORKER


@pytest.mark.parametrize(("dp", "pp"), [(2, 4), (2, 3), (2, 2), (3, 2), (3, 3), (5, 1), (16, 4)])
def test_one_worker_alone_is_named_in_grids_of_any_shape(dp: int, pp: int) -> None:
    topology, steps = (
        Topology(pp, 4, data_size=dp),
        STEPS if dp * pp > 5 else 60,  # lengths have to even out in small grids
    )
    stage, extra_s = 1.0 + 0.3 * np.arange(pp), lengths_s(topology, 3, steps)[0]
    clean = made(topology, dp + pp, stage, extra_s, steps)
    assert signals_of(Replay(clean)).slow_worker is None
    for place in ((0, 0), (dp - 1, pp - 1)):
        signals = signals_of(Replay(traces.slowed(clean, *place, 1.5)))
        assert [tuple(cell) for cell in np.argwhere(signals.worker_s.sum(axis=0) > 0)] == [(place[1], place[0])]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_pauses_in_forward_passes_are_the_garbage_collectors(se: Trace, seed: int, recorded: bool) -> None:
    clean = traces.levelled(se, noise=0.02, seed=seed)
    base_s = Replay(clean).recorded_step_s.mean()
    paused = traces.paused(clean, 0.3, 0.05, seed, recorded)
    found = diagnose(paused)
    assert found.verdict == (GARBAGE,)
    assert found.by_cause[GARBAGE] == pytest.approx(Replay(paused).recorded_step_s.mean() / base_s, rel=0.05)
    assert found.fixes[0].flags[0] == "--manual-gc"


def test_pauses_beside_the_stage_split_are_told_apart(st: Trace) -> None:
    assert diagnose(traces.paused(st, 0.4, 0.05)).verdict[:2] == (STAGE_SPLIT, GARBAGE)


def test_slow_transfers_are_communication() -> None:
    trace = made(SMALL)
    replay = Replay(trace)
    seconds = replay.actual_s.copy()
    sends = np.flatnonzero(traces.is_kind(replay, "grads-reduce-scatter"))
    seconds[::3, sends] *= 20.0
    found = diagnose(traces.replayed(trace, replay, seconds))
    assert found.verdict == (COMMUNICATION,)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lengths_are_told_from_lengths_where_the_trace_has_them(seed: int) -> None:
    extra_s, sequences = lengths_s(SMALL, seed, steps=20)
    found = diagnose(replace(made(SMALL, seed, extra_s=extra_s, steps=20), sequences=sequences))
    assert found.verdict == (SEQUENCE_LENGTHS,)
    assert answers(found, SEQUENCE_LENGTHS) == [YES] * 6


def test_variation_that_lengths_do_not_account_for_is_not_theirs() -> None:
    """Routing to experts, for one, makes micro-batches slow in all their passes, too."""
    extra_s, _ = lengths_s(SMALL, 0, steps=20)
    _, others = lengths_s(SMALL, 1, steps=20)
    found = diagnose(replace(made(SMALL, extra_s=extra_s, steps=20), sequences=others))
    assert SEQUENCE_LENGTHS not in found.verdict
    assert YES not in answers(found, SEQUENCE_LENGTHS)[1:4]


def test_pauses_of_the_stages_that_fetch_data_may_be_data_loading() -> None:
    clean, random = made(SMALL, steps=20), np.random.default_rng(0)
    replay = Replay(clean)
    seconds = replay.actual_s.copy()
    forwards = np.flatnonzero(traces.is_kind(replay, "forward-compute") & (replay.nodes.stage == 0))
    seconds[:, forwards] += 0.1 * (random.random(seconds[:, forwards].shape) < 0.1)
    found = diagnose(traces.replayed(clean, replay, seconds))
    assert found.verdict == (GARBAGE,)
    assert "data loading" in found.fixes[0].note


def test_noise_that_forward_and_backward_do_not_share_is_no_lengths() -> None:
    shape = (STEPS, SMALL.data_size, SMALL.num_stages, SMALL.num_microbatches)
    forward, backward = np.random.default_rng(0).lognormal(0.0, 0.3, (2, *shape))
    found = diagnose(traces.made_trace(SMALL, 0.01 * forward, 0.02 * backward))
    assert found.causes[SEQUENCE_LENGTHS] < 0.05
    assert found.verdict == (UNNAMED,)


# --- jobs of which less can be said


@pytest.mark.parametrize(
    "topology",
    [
        Topology(1, 4, data_size=4),
        Topology(4, 8),
        Topology(2, 2, data_size=2),
        Topology(1, 1),
        Topology(2, 8, virtual_size=2, data_size=2),
        Topology(4, 8, virtual_size=2, data_size=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, STEPS])
def test_what_can_be_said_is_said(topology: Topology, steps: int) -> None:
    found = diagnose(made(topology, steps=steps), layers=(2,) * topology.num_stages)
    assert found.verdict == (HEALTHY,)
    assert set(found.causes) == set(CAUSES)
    assert all(np.isfinite(share) for share in found.causes.values())
    unknown = [check for check in found.checklist if check.answer == UNKNOWN]
    assert all(check.measured and check.value is None for check in unknown)


def test_interleaved_stages_get_a_split_of_their_own() -> None:
    topology = Topology(2, 8, virtual_size=2, data_size=2)
    found = diagnose(made(topology, stage=[4.0, 4.0, 4.0, 8.0]), layers=(4, 4, 4, 4))
    assert found.verdict == (STAGE_SPLIT,)
    assert found.fixes[0].gain > 0.1


def test_a_split_of_a_job_with_multi_token_prediction_has_its_place() -> None:
    trace = made(Topology(4, 8), stage=[1.0, 1.0, 1.0, 2.0])
    trace = replace(trace, job=replace(trace.job, layers=(8, 8, 8, 8), shapes={"mtp_num_layers": 1}))
    assert "tmL" in diagnose(trace).fixes[0].flags[0]


def test_a_stage_without_layers_is_no_obstacle() -> None:
    """As the planner itself may leave one, with virtual stages; the others tell what a layer costs."""
    topology = Topology(2, 8, virtual_size=2)
    found = diagnose(made(topology, stage=[4.0, 2.0, 1e-3, 4.0]), layers=(4, 2, 0, 0))
    fix = found.fixes[0]
    assert found.verdict == (STAGE_SPLIT,) and fix.gain > 0.1 and "nan" not in fix.note and "-100" not in fix.note
    found = diagnose(made(Topology(2, 8), stage=[1.0, 4.0]), layers=(0, 3))  # here nothing does
    assert found.verdict == (STAGE_SPLIT,) and "no stage tells what a layer costs" in found.fixes[0].note


# --- the costs file


def test_costs_of_a_trace_are_a_costs_file_for_any_model(st: Trace, tmp_path: Path) -> None:
    split = recorded_split(st, (9,) * 4)
    save_costs(tmp_path / "costs.json", split.table())
    costs = load_costs(tmp_path / "costs.json")
    model = ModelSpec.from_arguments(
        {
            "num_layers": 36,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "seq_length": 2048,
            "padded_vocab_size": 32000,
        }
    )
    chain = costs.chain(model, split.simulator.topology)
    assert (chain.head, chain.layers[0], len(chain.layers)) == (split.costs.head, split.costs.mean_layer, 36)
    assert costs.with_attention(0.5).layers == costs.layers
    with pytest.raises(BalanceError, match="do not tell what of a layer is attention"):
        SequenceCost.of_table(costs, model, split.simulator.topology)
    costs.check_fits({"hidden_size": 1024, "tensor_size": 2}, "the costs")
    elsewhere = replace(costs, holds_for={"tensor_size": 4})
    with pytest.raises(BalanceError, match="tensor_size is 2 here, 4 there"):
        elsewhere.check_fits({"tensor_size": 2}, "the costs")


def test_layers_come_from_the_trace_where_it_names_them(st: Trace) -> None:
    named = replace(st, job=replace(st.job, layers=(9,) * 4))
    assert {fix.memory for fix in diagnose(named).fixes} == {WITHIN, FREE}
    assert NO not in answers(diagnose(named), STAGE_SPLIT)
