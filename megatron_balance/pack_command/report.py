"""What was found about a data set and a job: what is printed, and what is written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_balance.pack_command.request import Request
from megatron_balance.packing.documents import Documents, Totals

OURS, FIRST_FIT, IN_ORDER = "packed", "first_fit", "in_order"
CHOPPED, UNDIVIDED = "chopped", "chopped_undivided"
NAMES = {
    UNDIVIDED: "chopped, undivided attention",
    CHOPPED: "chopped, attention by document",
    IN_ORDER: "packed in order",
    FIRST_FIT: "first-fit-decreasing, evened",
    OURS: "this plan",
}
_NOTICEABLE = 0.02  # of a step; less is not worth a change
_BUSY = 0.02  # of a step over one in which no rank waits


@dataclass(frozen=True)
class Bar:
    """Documents of ``first`` to ``last`` tokens: how many there are, and how many tokens they have together."""

    first: int
    last: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class DataSet:
    """One data set of the blend.

    Attributes:
        name: prefix or file.
        weight: share of all tokens that it gives.
        totals: what it holds.
        batches_per_epoch: global batches in which it is read once.
    """

    name: str
    weight: float
    totals: Totals
    batches_per_epoch: float


@dataclass(frozen=True)
class Outcome:
    """How one way of making global batches does, over all steps that were simulated.

    Attributes:
        key: one of ``NAMES``.
        steps: simulated.
        fill: mean share of the bins' tokens that documents take.
        least_fill: of the emptiest global batch.
        cut_documents: share of the documents that are in more than one bin.
        data_parallel_max_over_mean: cost of the data-parallel rank that has most to do over the mean one, mean of the steps.
        micro_batch_max_over_mean: the same of micro-batches.
        step_over_ideal: seconds of the steps over those in which no rank ever waits, for the same bins.
        s_per_token: seconds of a step over its labels; in units of the cost where that is no time.
    """

    key: str
    steps: int
    fill: float
    least_fill: float
    cut_documents: float
    data_parallel_max_over_mean: float
    micro_batch_max_over_mean: float
    step_over_ideal: float
    s_per_token: float

    @property
    def name(self) -> str:
        return NAMES[self.key]

    @property
    def work_s_per_token(self) -> float:
        """The same if no rank ever waited."""
        return self.s_per_token / self.step_over_ideal


@dataclass(frozen=True)
class Report:
    """What `megatron-balance pack` found.

    Attributes:
        request: what was asked.
        data_sets: of the blend.
        histogram: lengths of all documents.
        tokens_per_batch: labels of a global batch, mean.
        documents_per_batch: that end in a global batch, mean.
        batches_cut: global batches that fill and tokens are means of.
        fill, least_fill: share of the bins' tokens that pieces take, with their alignment, mean and of the emptiest batch.
        outcomes: by way of making batches, stock first, this plan last.
        bound_over_ideal: below which no placement of this plan's documents gets, over the first steps.
        above_bound: share of this plan's steps that is above it, of the same steps.
        longest_over_mean: cost of the costliest piece in its bin over the mean micro-batch's, mean of the steps.
        fallbacks: steps whose placement is that of first-fit-decreasing in a good order.
    """

    request: Request
    data_sets: tuple[DataSet, ...]
    histogram: tuple[Bar, ...]
    tokens_per_batch: float
    documents_per_batch: float
    batches_cut: int
    fill: float
    least_fill: float
    outcomes: tuple[Outcome, ...]
    bound_over_ideal: float
    above_bound: float
    longest_over_mean: float
    fallbacks: int

    def outcome(self, key: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.key == key)

    @property
    def ours(self) -> Outcome:
        return self.outcome(OURS)

    def gain_over(self, key: str) -> float:
        """By which share more tokens a second this plan learns from; negative where it is slower."""
        return self.outcome(key).s_per_token / self.ours.s_per_token - 1

    @property
    def worth_it(self) -> bool:
        """Whether it is noticeably faster than what stock Megatron does with the same documents."""
        return self.gain_over(UNDIVIDED) >= _NOTICEABLE

    @property
    def limit(self) -> str:
        """What keeps a step of this plan from having no rank wait."""
        topology, waits = self.request.grid.topology, self.ours.step_over_ideal - 1
        ranks, microbatches = topology.pipeline_size, topology.num_microbatches
        ends = (ranks - 1) / (topology.virtual_size * microbatches)
        if waits < _BUSY:
            return "next to nothing: the ranks hardly wait"
        if self.longest_over_mean > 1.5 and waits > ends:
            return (
                f"the longest documents: a micro-batch with the longest of a step costs {self.longest_over_mean:.1f} mean ones"
                " at least (larger global batches dilute it, context parallelism shortens it)"
            )
        if waits <= 2 * ends:
            remedy = (
                "larger global batches or virtual stages" if topology.virtual_size == 1 else "larger global batches"
            )
            return (
                f"the pipeline's filling and draining: {ranks} ranks with {microbatches} micro-batches wait"
                f" {100 * ends:.1f} % of a step of equal ones ({remedy} lessen it)"
            )
        if microbatches < 4:
            return f"few micro-batches: with {microbatches} a step there is little to even out (larger global batches help)"
        return "lengths that differ: few documents in a bin"

    def values(self) -> dict[str, Any]:
        """The report as JSON holds it.

        Keys: ``documents``, ``tokens``, ``labels``, ``longest_document``, ``without_labels``, ``long_documents`` (with
        more labels than a bin holds), ``labels_left_out`` (of truncated and dropped ones): all data sets together, of
        the ``train_share`` of their documents; ``data_sets``: each, with its ``weight`` and ``batches_per_epoch``;
        ``histogram``; ``batch``: of the plan; ``bins``: what was asked; ``outcomes``: by way of making batches;
        ``lower_bound_over_ideal`` and ``step_above_bound``, the share of this plan's steps above it; ``gain``: of this
        plan over each other way, in tokens a second; ``worth_it``; ``limited_by``; ``assumed``: flags that were not
        given.
        """
        request, topology = self.request, self.request.grid.topology
        totals = [one.totals for one in self.data_sets]
        return {
            "documents": sum(one.documents for one in totals),
            "train_share": request.part[1],
            "tokens": sum(one.tokens for one in totals),
            "labels": sum(one.labels for one in totals),
            "longest_document": max(one.longest_tokens for one in totals),
            "without_labels": sum(one.without_labels for one in totals),
            "long_documents": sum(one.longer_than_bin for one in totals),
            "labels_left_out": sum(one.labels - one.kept_labels for one in totals),
            "data_sets": [
                {
                    "name": one.name,
                    "weight": one.weight,
                    **asdict(one.totals),
                    "batches_per_epoch": one.batches_per_epoch,
                }
                for one in self.data_sets
            ],
            "histogram": [asdict(bar) for bar in self.histogram],
            "bins": {
                "seq_length": request.rule.seq_length,
                "alignment": request.rule.alignment,
                "long_documents": request.rule.long_documents,
                "shapes": request.bin_cost.shapes,
                "seed": request.seed,
                "global_batch_size": request.grid.num_bins,
                "micro_batch_size": topology.micro_batch_size,
                "num_microbatches": topology.num_microbatches,
                "data_parallel_size": topology.data_size,
                "pipeline_model_parallel_size": topology.pipeline_size,
                "virtual_pipeline_size": topology.virtual_size,
                "lockstep_size": request.grid.lockstep_size,
            },
            "costs": request.cost_source,
            "costs_in_seconds": request.in_seconds,
            "batch": {
                "tokens": self.tokens_per_batch,
                "documents": self.documents_per_batch,
                "fill": self.fill,
                "least_fill": self.least_fill,
                "batches_cut": self.batches_cut,
            },
            "outcomes": {one.key: {"name": one.name, **_without(asdict(one), "key")} for one in self.outcomes},
            "lower_bound_over_ideal": self.bound_over_ideal,
            "step_above_bound": self.above_bound,
            "longest_piece_over_mean_micro_batch": self.longest_over_mean,
            "fallback_steps": self.fallbacks,
            "gain": {one.key: self.gain_over(one.key) for one in self.outcomes if one.key != OURS},
            "worth_it": self.worth_it,
            "limited_by": self.limit,
            "assumed": list(request.assumed),
        }


def histogram(data_sets: Sequence[Documents]) -> tuple[Bar, ...]:
    """Documents by powers of two of their tokens; those below 16 in one bar, empty bars at both ends left out."""
    most = max(int(one.lengths.max()) for one in data_sets)
    edges = np.array([0, *(2**power for power in range(4, max(5, most.bit_length() + 1)))])
    documents, tokens = np.zeros(edges.size - 1, np.int64), np.zeros(edges.size - 1, np.int64)
    for one in data_sets:
        for chunk in np.array_split(one.lengths, max(1, one.lengths.size >> 22)):
            place = np.searchsorted(edges, chunk, side="right") - 1
            documents += np.bincount(place, minlength=documents.size)
            tokens += np.bincount(place, chunk, documents.size).astype(np.int64)
    shown = np.flatnonzero(documents)
    return tuple(
        Bar(int(edges[i]), int(edges[i + 1]) - 1, int(documents[i]), int(tokens[i]))
        for i in range(shown[0], shown[-1] + 1)
    )


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
