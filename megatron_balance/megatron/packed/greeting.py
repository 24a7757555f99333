"""What rank 0 says when packed training starts: how full the bins are, and what the plan is worth against the stock order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.megatron.packed.placing import Placing
from megatron_balance.packing.baselines import concatenate_and_chop
from megatron_balance.packing.cut import GlobalBatch
from megatron_balance.packing.documents import Blend, Totals
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.placement import Placement
from megatron_balance.packing.step import judge_of, micro_batch_s


@dataclass(frozen=True)
class Balance:
    """Simulated steps of some global batches, on average.

    Attributes:
        step_over_ideal: step over that of ranks that never wait.
        slowest_over_mean: work of the data-parallel rank with most over the mean rank's.
    """

    step_over_ideal: float
    slowest_over_mean: float

    @classmethod
    def of(cls, placing: Placing, dealt: Sequence[tuple[np.ndarray, np.ndarray, Grid]]) -> Balance:
        """From the tokens of the pieces, their bins and the grid of each global batch."""
        steps, ranks = [], []
        for tokens, bins, grid in dealt:
            seconds = micro_batch_s(bins, placing.cost.piece_s(tokens), placing.cost.empty_s, grid)
            steps.append(judge_of(grid).step_over_ideal(seconds))
            work = seconds.sum(axis=(0, 2))
            ranks.append(float(work.max() / work.mean()))
        return cls(float(np.mean(steps)), float(np.mean(ranks)))

    def __str__(self) -> str:
        return f"{self.step_over_ideal:.3f} of ideal, slowest rank {self.slowest_over_mean:.3f} of the mean"


def greeting(blend: Blend, batches: Sequence[GlobalBatch], placing: Placing) -> str:
    """A few lines about the data and its first global batches."""
    totals = [Totals.of(documents, placing.rule) for documents in blend.data_sets]
    documents, labels, longer, without = (
        sum(getattr(each, name) for each in totals)
        for name in ("documents", "labels", "longer_than_bin", "without_labels")
    )
    fill = np.mean([batch.fill for batch in batches])
    placed = [(batch, placing(batch)) for batch in batches]
    ours = Balance.of(
        placing, [(batch.pieces.tokens, each.bins, placing.wide_grid_of(batch.num_bins)) for batch, each in placed]
    )
    stock = Balance.of(placing, [_chopped(batch, placing) for batch in batches])
    return (
        f"megatron-balance: packing {documents:,} documents of {labels:,} labels into bins of {placing.rule.seq_length:,} tokens,"
        f" {fill:.1%} full, micro-batches of {placing.cost.shapes} shape; {longer:,} documents are longer than a bin"
        f" ({placing.rule.long_documents}), {without:,} have no label\n"
        f"megatron-balance: simulated step of the first {len(batches)} global batches: {ours}; documents concatenated and"
        f" chopped: {stock}"
        f"{_of_more(placed, placing)}"
    )


def _of_more(placed: Sequence[tuple[GlobalBatch, Placement]], placing: Placing) -> str:
    """What more micro-batches than the global batch's size says are worth; nothing where there are none."""
    counted = placing.grid.topology.num_microbatches
    if not (more := placing.more_of(counted)):
        return ""
    gain = np.mean([placing.in_its_bins(batch).step_s / placement.step_s for batch, placement in placed])
    return (
        f"\nmegatron-balance: with {counted} + {more} micro-batches the simulated step is {gain:.3f} times faster than with"
        f" {counted}"
    )


def _chopped(batch: GlobalBatch, placing: Placing) -> tuple[np.ndarray, np.ndarray, Grid]:
    grid = placing.grid_of(batch.num_bins)
    chopped = concatenate_and_chop(batch.pieces.tokens, placing.rule, grid)
    return chopped.tokens, chopped.bins, grid
