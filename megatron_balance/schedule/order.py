"""The order in which each pipeline rank runs its forward and backward passes, as Megatron's schedules have it.

Source: ``megatron/core/pipeline_parallel/schedules.py`` (``forward_backward_no_pipelining``,
``forward_backward_pipelining_without_interleaving``, ``forward_backward_pipelining_with_interleaving``,
``get_pp_rank_microbatches``, ``get_schedule_table``) and ``combined_1f1b.py``, the same in Megatron core 0.16 to 0.19. The
order is static: it depends on the sizes alone, never on how long anything takes.

With ``overlap_moe`` every rank runs one forward pass more before it alternates, and each of its pairs as one: layer by
layer, the forward pass of one micro-batch beside the backward pass of another. The operations and their order are
Megatron's; such a pair is kept as its forward and its backward pass, in this order, marked as ``combined``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class Order:
    """What each pipeline rank runs, in turn. All arrays have the shape [PP, 2 * M * V].

    Attributes:
        is_backward: bool; False for a forward pass.
        chunk: int32; model chunk of the rank.
        microbatch: int32; micro-batch of the step.
        combined: bool; True for a forward pass that runs as one with the backward pass behind it.
    """

    is_backward: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    combined: np.ndarray


def check_schedule(topology: Topology) -> None:
    """Refuse what Megatron's schedules refuse.

    Raises:
        BalanceError: interleaving without a pipeline, micro-batches that do not fit the interleaved groups, or
            ``overlap_moe`` without interleaving.
    """
    if topology.virtual_size == 1:
        if topology.overlap_moe and topology.pipeline_size > 1:
            raise BalanceError(
                f"--overlap-moe-expert-parallel-comm needs virtual stages on {topology.pipeline_size} pipeline ranks, "
                "there are none: give --num-virtual-stages-per-pipeline-rank 2 or more, or leave the overlap out"
            )
        return
    ranks, chunks, microbatches = topology.pipeline_size, topology.virtual_size, topology.num_microbatches
    if ranks == 1:
        raise BalanceError(
            f"{chunks} virtual stages need at least 2 pipeline ranks, there is 1: drop the virtual stages or raise "
            "--pipeline-model-parallel-size"
        )
    group = topology.group_size
    if microbatches < ranks:
        raise BalanceError(
            f"the interleaved schedule needs at least as many micro-batches as pipeline ranks: there are "
            f"{microbatches} micro-batches and {ranks} ranks; raise --global-batch-size to at least "
            f"{ranks * topology.micro_batch_size * topology.data_size}, or drop the virtual stages"
        )
    if not ranks <= group <= microbatches:
        raise BalanceError(
            f"groups of {group} micro-batches are outside {ranks} (pipeline ranks) to {microbatches} (micro-batches of "
            "a step): change --microbatch-group-size-per-virtual-pipeline-stage"
        )
    remainder = microbatches % group
    if 0 < remainder < ranks:
        fitting = microbatches - remainder
        raise BalanceError(
            f"{microbatches} micro-batches in groups of {group} leave a last group of {remainder}, which must be 0 or "
            f"at least {ranks} (pipeline ranks): {fitting} or {fitting + group} micro-batches fit; change "
            "--global-batch-size or --microbatch-group-size-per-virtual-pipeline-stage"
        )


def schedule_order(topology: Topology) -> Order:
    """The operations of one training step on each pipeline rank.

    Raises:
        BalanceError: Megatron would refuse to run this schedule (see ``check_schedule``).
    """
    check_schedule(topology)
    ranks, microbatches, chunks = topology.pipeline_size, topology.num_microbatches, topology.virtual_size
    chunk_of, microbatch_of = _forward_table(topology)
    passes = microbatches * chunks
    is_backward = np.zeros((ranks, 2 * passes), dtype=bool)
    combined = np.zeros_like(is_backward)
    chunk = np.empty(is_backward.shape, dtype=np.int32)
    microbatch = np.empty_like(chunk)
    for rank in range(ranks):
        warmup = _num_warmup(topology, rank)
        forward_slots, backward_slots = _slots(passes, warmup)
        combined[rank, forward_slots[warmup:]] = topology.overlap_moe
        is_backward[rank, backward_slots] = True
        chunk[rank, forward_slots], microbatch[rank, forward_slots] = chunk_of, microbatch_of
        chunk[rank, backward_slots], microbatch[rank, backward_slots] = chunks - 1 - chunk_of, microbatch_of
    return Order(is_backward, chunk, microbatch, combined)


def _forward_table(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Chunk and micro-batch of a rank's 1st, 2nd, ... forward pass: chunk by chunk within a group of micro-batches.

    Backward passes follow the same table with the chunks mirrored.
    """
    microbatches, chunks = topology.num_microbatches, topology.virtual_size
    group = topology.group_size if chunks > 1 else microbatches
    microbatch, chunk = np.meshgrid(np.arange(microbatches), np.arange(chunks), indexing="ij")
    turn = np.lexsort((microbatch.ravel(), chunk.ravel(), microbatch.ravel() // group))
    return chunk.ravel()[turn].astype(np.int32), microbatch.ravel()[turn].astype(np.int32)


def _num_warmup(topology: Topology, rank: int) -> int:
    """Forward passes that ``rank`` runs before it alternates forward and backward."""
    later_ranks = topology.pipeline_size - 1 - rank
    chunks, microbatches = topology.virtual_size, topology.num_microbatches
    warmup = later_ranks if chunks == 1 else 2 * later_ranks + (chunks - 1) * topology.group_size
    return min(warmup + topology.overlap_moe, microbatches * chunks)


def _slots(passes: int, warmup: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of a rank's forward and backward passes in its sequence: warm-up, one of each in turn, the rest."""
    turn = np.arange(passes)
    forward = turn + np.maximum(turn - warmup, 0)
    backward = turn + np.minimum(warmup + turn + 1, passes)
    return forward, backward
