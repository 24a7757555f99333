"""What to do about the causes, and what that would bring, reckoned from the trace itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.memory import ChainMemory, ElementMemory
from megatron_balance.diagnosis.causes import Causes
from megatron_balance.diagnosis.costs import RecordedSplit
from megatron_balance.diagnosis.result import (
    COMMUNICATION,
    GARBAGE,
    SEQUENCE_LENGTHS,
    STAGE_SPLIT,
    WORKER,
    Fix,
)
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.layout import Layout
from megatron_balance.pipeline.memory import MemoryLimit, limit_like, rank_peaks

if TYPE_CHECKING:
    from megatron_balance.schedule.simulate import Simulator

WITHIN, FREE = "within the present split's memory", "free"
_WORTH = 1e-3  # of a step: less is no gain
_GC_INTERVAL = 100  # steps: often enough that little garbage gathers, seldom enough not to be felt
_UNKNOWN_LAYERS = (
    "how many layers each stage holds is not known (--layers 9,9,9,9, or layers in the metadata), so no split is proposed; the"
    " step is that of perfectly even stages, which whole layers and the head may not allow"
)


def fixes_of(
    causes: Causes, split: RecordedSplit | None, named: tuple[str, ...], worker: tuple[int, int] | None
) -> tuple[Fix, ...]:
    """Fixes for the named causes, best first.

    Args:
        causes: of the trace.
        split: the job with its layers; None where they are not known.
        named: causes that count.
        worker: the slow worker (DP rank, PP rank).
    """
    fixes: list[Fix] = []
    if STAGE_SPLIT in named:
        fixes += _splits(causes, split)
    fixes += [_levelled(causes, cause, worker) for cause in named if cause in _OTHERS]
    return tuple(sorted((fix for fix in fixes if fix.gain > _WORTH), key=lambda fix: -fix.gain))


def proposals(split: RecordedSplit) -> dict[str, tuple[int, ...]]:
    """The best layers of each stage, by whose memory they keep to.

    Of the memory only what is in flight is known: the activations of layers. The limit is the present split's fullest rank.

    Raises:
        BalanceError: the trace does not tell what a layer costs.
    """
    memory = layers_in_flight(sum(split.layers))
    limit = limit_like(memory, split.simulator.topology, split.layers)
    return {
        name: best_split(split.costs, split.simulator, split.layers, within)
        for name, within in ((WITHIN, limit), (FREE, None))
    }


def best_split(
    costs: ChainCosts, simulator: Simulator, layers: Sequence[int], memory: MemoryLimit | None = None
) -> tuple[int, ...]:
    """Layers of each stage whose simulated pipeline takes least, never longer than with these.

    Args:
        costs: of the elements.
        simulator: of the schedule.
        layers: of each stage at present.
        memory: what a rank may occupy; None is no limit.

    Raises:
        BalanceError: as ``find_split``.
    """
    from megatron_balance.pipeline.search import find_split  # compiled code, which only a split needs

    return find_split(costs, simulator, memory=memory, starts=[layers], sharpens_bound=False).layers


def layers_in_flight(num_layers: int) -> ChainMemory:
    """Memory counted in layers in flight alone."""
    nothing = ElementMemory()
    return ChainMemory(nothing, (ElementMemory(activation_bytes=1.0),) * num_layers, nothing, nothing)


def _splits(causes: Causes, split: RecordedSplit | None) -> list[Fix]:
    if split is None:
        return [_even_stages(causes, _UNKNOWN_LAYERS)]
    try:
        found = proposals(split)
    except BalanceError as error:
        return [_even_stages(causes, str(error))]
    # Of multi-token prediction: Megatron counts the m of a layout.
    depths = causes.replay.trace.job.shapes.get("mtp_num_layers") or 0
    if found[WITHIN] == found[FREE]:
        del found[FREE]
    return [
        Fix(
            STAGE_SPLIT,
            (f"--pipeline-model-parallel-layout {shlex.quote(str(Layout.of(layers, depths)))}",),
            predicted_step_s=split.step_with_s(layers),
            present_step_s=split.step_s,
            memory=memory,
            note=_split_note(split, layers),
        )
        for memory, layers in found.items()
        if layers != split.layers
    ]


def _split_note(split: RecordedSplit, layers: tuple[int, ...]) -> str:
    memory, topology = layers_in_flight(sum(layers)), split.simulator.topology
    both = split.layers, layers
    flights = [float(rank_peaks(memory, topology, each).max()) for each in both]
    held = [int(np.reshape(each, (-1, topology.pipeline_size)).sum(axis=0).max()) for each in both]
    grown_s = split.simulated_s(layers) + split.grown_rest_s(layers)
    return (
        f"layers {' '.join(map(str, layers))} instead of {' '.join(map(str, split.layers))}; activations of {flights[1]:.0f}"
        f" layers in flight on the fullest rank instead of {flights[0]:.0f}, parameters of {held[1]} layers instead of {held[0]};"
        f" {100 * (split.step_s / grown_s - 1):+.1f} % if optimizer and exchange of gradients grow with a rank's layers"
    )


def _even_stages(causes: Causes, why: str) -> Fix:
    return Fix(
        STAGE_SPLIT, ("--balanced-pipeline",), causes.without_s[STAGE_SPLIT], causes.actual_s, memory=FREE, note=why
    )


_OTHERS = {
    SEQUENCE_LENGTHS: (
        ("--varlen-packing", "--calculate-per-token-loss"),
        "at most this, the step of micro-batches that all take as long: documents costlier than a mean micro-batch prevent it",
    ),
    GARBAGE: (
        ("--manual-gc", f"--manual-gc-interval {_GC_INTERVAL}"),
        "pauses then come on all ranks in the same step; the step between them",
    ),
    WORKER: ((), "look at this rank's device, host and links, or exchange its host"),
    COMMUNICATION: ((), "look at the network: links, congestion, where ranks are placed"),
}


def _fetching_alone(causes: Causes) -> bool:
    """Whether pauses that nobody recorded are on the first and the last stage alone, which fetch batches."""
    signals = causes.signals
    if signals is None or signals.pauses_recorded or signals.seconds.shape[2] < 3:
        return False
    return not signals.pause_s[:, :, 1:-1].any()


def _levelled(causes: Causes, cause: str, worker: tuple[int, int] | None) -> Fix:
    flags, note = _OTHERS[cause]
    if cause == GARBAGE and _fetching_alone(causes):
        note = f"{note}; but all pauses are on the stages that fetch data: look at data loading first"
    if cause == WORKER and worker is not None:
        note = f"data-parallel rank {worker[0]}, pipeline rank {worker[1]}: {note}"
    return Fix(cause, flags, causes.without_s[cause], causes.actual_s, note=note)
