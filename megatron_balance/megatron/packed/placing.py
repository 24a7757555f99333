"""Where the documents of each global batch go: the costs and the profile that all ranks place by."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.costs.analytic import analytic_table
from megatron_balance.megatron.agreement import decide_on_rank_0
from megatron_balance.megatron.arguments import ANALYTIC, Options, topology_of
from megatron_balance.megatron.job_costs import device_here, device_of_job, table_of_job
from megatron_balance.megatron.packed.options import without_spec
from megatron_balance.model import ModelSpec
from megatron_balance.packing import sizes
from megatron_balance.packing.cost import BinCost, SequenceCost
from megatron_balance.packing.cut import GlobalBatch
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.placement import Placement, place
from megatron_balance.packing.profile import Profile, from_json, load_or_tune, to_json

_KEY = "job"  # of the profile, between ranks


def _none(num_microbatches: int) -> int:
    return 0


@dataclass(frozen=True)
class Placing:
    """Places global batches of any size for the ranks of a job.

    Attributes:
        grid: of a full global batch.
        rule: of the pieces.
        cost: of a bin.
        profile: that placements aim at.
        more_of: micro-batches that a step has beyond those that its size says, by their number.
    """

    grid: Grid
    rule: PieceRule
    cost: BinCost
    profile: Profile
    more_of: Callable[[int], int] = _none

    def __call__(self, batch: GlobalBatch) -> Placement:
        placement = self.in_its_bins(batch)
        wide = self.wide_grid_of(batch.num_bins)
        if batch.num_bins == wide.num_bins or batch.pieces.tokens.size < wide.num_bins:
            return placement
        bins = spread(batch.bins, batch.pieces.tokens, batch.num_bins, wide.num_bins)
        wider = place(batch.pieces.tokens, self.cost, self.rule, wide, self.profile, bins)
        return min(placement, wider, key=lambda each: each.step_s)

    def in_its_bins(self, batch: GlobalBatch) -> Placement:
        """The placement in as many micro-batches as the batch's size says."""
        grid = self.grid_of(batch.num_bins)
        return place(batch.pieces.tokens, self.cost, self.rule, grid, self.profile, batch.bins)

    def for_evaluation(self, size: int) -> Placing:
        """The same for evaluation, whose micro-batches may have another ``size``; there are no more than its batch says."""
        grid = replace(self.grid, topology=replace(self.grid.topology, micro_batch_size=size))
        return replace(self, grid=grid, more_of=_none)

    def wide_grid_of(self, num_bins: int) -> Grid:
        """The grid of a global batch of ``num_bins`` bins with all its micro-batches."""
        grid = self.grid_of(num_bins)
        counted = grid.topology.num_microbatches
        return replace(grid, topology=replace(grid.topology, num_microbatches=counted + self.more_of(counted)))

    def grid_of(self, num_bins: int) -> Grid:
        """The grid of a global batch of ``num_bins`` bins, which a ramp-up may make smaller."""
        topology = self.grid.topology
        microbatches = num_bins // (topology.data_size * topology.micro_batch_size)
        return replace(self.grid, topology=replace(topology, num_microbatches=microbatches))


def spread(bins: np.ndarray, tokens: np.ndarray, filled: int, num_bins: int) -> np.ndarray:
    """Bins of pieces with more bins, none of them empty: the longest pieces that are not the first of theirs get the new ones.

    Args:
        bins: of each piece, none empty, int32 of shape [pieces].
        tokens: of each piece, shape [pieces].
        filled: number of bins so far.
        num_bins: number of bins then, no more than pieces.
    """
    _, first = np.unique(bins, return_index=True)
    others = np.setdiff1d(np.arange(bins.size), first)
    moved = others[np.argsort(-tokens[others], kind="stable")][: num_bins - filled]
    wider = bins.copy()
    wider[moved] = np.arange(filled, num_bins)
    return wider


def agreed_cost(args: Any, grid: Grid) -> SequenceCost:
    """What a sequence costs by rank 0, on all ranks: they must not place by costs of different devices.

    With ``--balanced-pipeline`` from the costs that the split is planned on, unless they are of a trace; else estimated, with
    Megatron's own layers in place of others.
    """

    def find() -> str:
        model, topology, options = ModelSpec.from_arguments(without_spec(args)), grid.topology, Options.from_args(args)
        # Attention within sequences visits the unmasked half only and keeps no scores, also in local layers.
        fused = replace(model, fused_kernels=True)
        if options is None or options.costs_kind == ANALYTIC:
            model = fused
        device = device_here() if options is None else device_of_job(options)
        table = None if options is None else table_of_job(args, options, model, topology)
        if table is None or not table.tells_attention:
            model, table = fused, analytic_table(fused, topology, device)
        of_device = device if table.kind == "analytic" else None
        return json.dumps(astuple(SequenceCost.of_table(table, model, topology, of_device)))

    linear, quadratic = json.loads(decide_on_rank_0("packing cost", find))
    return SequenceCost(tuple(linear), tuple(tuple(each) for each in quadratic))


def agreed_profile(
    samples: Callable[[], Sequence[np.ndarray]], cost: BinCost, rule: PieceRule, grid: Grid, folder: Path | None
) -> Profile:
    """Rank 0's profile, on all ranks: found in ``folder``, or tuned on ``samples``, the tokens of some global batches' pieces.

    Ranks that placed by different profiles would train on some documents twice and never on others.
    """

    def find() -> str:
        return to_json(load_or_tune(folder, samples(), cost, rule, grid), _KEY)

    return from_json(decide_on_rank_0("packing profile", find), _KEY)


def grid_of(args: Any, num_microbatches: int) -> Grid:
    """The grid of a job's global batches."""
    topology = topology_of(args, num_microbatches)
    return sizes.grid_of(topology, args.expert_model_parallel_size, args.expert_tensor_parallel_size)
