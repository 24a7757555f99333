"""The comparison: the same stream of documents made into global batches in several ways, each simulated step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_balance.pack_command.report import (
    CHOPPED,
    FIRST_FIT,
    IN_ORDER,
    OURS,
    UNDIVIDED,
    DataSet,
    Outcome,
    Report,
    histogram,
)
from megatron_balance.pack_command.request import Request
from megatron_balance.packing.baselines import chop, first_fit, next_fit
from megatron_balance.packing.bound import lower_bound_s
from megatron_balance.packing.cut import GlobalBatch, batches
from megatron_balance.packing.documents import Blend, Totals
from megatron_balance.packing.index import epoch_order
from megatron_balance.packing.pieces import Pieces
from megatron_balance.packing.placement import FALLBACK, Placement, place
from megatron_balance.packing.profile import Profile, load_or_tune, tuning_grid, tuning_samples
from megatron_balance.packing.step import StepJudge, judge_of, micro_batch_s
from megatron_balance.packing.stream import Stream
from megatron_balance.reporting import progress

_MOST_BOUNDED = 4096  # operations of a step's schedule times steps whose bound is computed: some seconds
# Of which a whole epoch of all data sets is cut to count its batches; of more, the batches simulated tell.
_MOST_PIECES, _MOST_BATCHES = 5_000_000, 20_000


@dataclass(frozen=True, eq=False)
class Step:
    """One simulated step.

    Attributes:
        seconds: forward and backward, of each micro-batch in all stages together, shape [2, DP, M].
        tokens: labels that it learns from.
        room: tokens that its pieces take, their alignment included.
    """

    seconds: np.ndarray
    tokens: int
    room: int


@dataclass(frozen=True, eq=False)
class Study:
    """What was simulated.

    Attributes:
        request: what was asked.
        data_sets: names of the blend's.
        batches: the global batches of the plan.
        placements: where their pieces go.
        steps: of each way of making batches.
    """

    request: Request
    data_sets: tuple[str, ...]
    batches: tuple[GlobalBatch, ...]
    placements: tuple[Placement, ...]
    steps: dict[str, tuple[Step, ...]]


def study(request: Request, blend: Blend) -> tuple[Report, Study]:
    """Cut, place and simulate as many global batches as are asked for, in all ways.

    Raises:
        BalanceError: an epoch does not fill a global batch, or the cache cannot be written.
    """
    cache = None if request.cache_folder is None else Path(request.cache_folder)
    stream = Stream(
        blend,
        request.rule,
        request.seed,
        lambda data_set, epoch: epoch_order(blend.data_sets[data_set], request.seed, data_set, epoch, cache),
    )
    cut, counted = _cut(request, stream)
    profile = _profile(request, stream, cache)
    placements = _placed(request, cut, profile)
    run = _run(request, stream)
    steps = {
        UNDIVIDED: tuple(_undivided(request)),
        CHOPPED: tuple(_chopped(request, run)),
        IN_ORDER: tuple(_in_order(request, run)),
        FIRST_FIT: tuple(_of_batches(request, cut, _first_fit(request, cut))),
        OURS: tuple(_of_batches(request, cut, [placement.bins for placement in placements])),
    }
    found = Study(request, tuple(one.name for one in blend.data_sets), cut, placements, steps)
    return _report(request, blend, found, counted, run), found


# --- this plan


@dataclass(frozen=True)
class _Counted:
    """Means over the global batches that were cut."""

    batches: int
    tokens: float
    documents: float
    fill: float
    least_fill: float


def _cut(request: Request, stream: Stream) -> tuple[tuple[GlobalBatch, ...], _Counted]:
    """The global batches that are to be simulated; and what there is to say of them, or of a whole epoch if that is quick."""
    labels = _epoch_labels(request, stream.blend)
    whole = labels is not None
    first: list[GlobalBatch] = []
    tokens = ended = fill = 0.0
    number, least = 0, 1.0
    with progress("cutting global batches", labels or request.batches) as advance:
        for batch in batches(stream, stream.start, itertools.repeat(request.grid.num_bins)):
            number += 1
            if len(first) < request.batches:
                first.append(batch)
            counts = batch.counts
            tokens, ended, fill = tokens + counts.tokens, ended + counts.documents, fill + batch.fill
            least = min(least, batch.fill)
            advance(counts.tokens if whole else 1)
            if number >= request.batches and (not whole or batch.stop.epochs):
                break
    return tuple(first), _Counted(number, tokens / number, ended / number, fill / number, least)


def _epoch_labels(request: Request, blend: Blend) -> float | None:
    """Labels dealt until each data set has been read once, a small one of much weight often; None where that takes long."""
    totals = [Totals.of(one, request.rule) for one in blend.data_sets]
    labels = max(total.kept_labels / weight for total, weight in zip(totals, blend.weights, strict=True))
    capacity = request.rule.seq_length
    pieces = sum(
        (total.documents + total.kept_labels / capacity) * labels * weight / total.kept_labels
        for total, weight in zip(totals, blend.weights, strict=True)
    )
    many = pieces > _MOST_PIECES or labels / capacity > _MOST_BATCHES * request.grid.num_bins
    return None if many else labels


def _profile(request: Request, stream: Stream, cache: Path | None) -> Profile:
    grid = tuning_grid(request.grid)
    samples = tuning_samples(stream, grid.num_bins)
    with progress("tuning the placement", 1.0) as advance:
        return load_or_tune(cache, samples, request.bin_cost, request.rule, grid, advance)


def _placed(request: Request, cut: tuple[GlobalBatch, ...], profile: Profile) -> tuple[Placement, ...]:
    with progress("placing documents", len(cut)) as advance:
        placed = []
        for batch in cut:
            placed.append(place(batch.pieces.tokens, request.bin_cost, request.rule, request.grid, profile, batch.bins))
            advance(1)
    return tuple(placed)


def _first_fit(request: Request, cut: tuple[GlobalBatch, ...]) -> Iterator[np.ndarray]:
    for batch in cut:
        yield first_fit(batch.pieces.tokens, request.bin_cost, request.rule, request.grid).bins


def _of_batches(request: Request, cut: tuple[GlobalBatch, ...], bins: Iterable[np.ndarray]) -> Iterator[Step]:
    """Steps of the plan's own global batches, with a bin for each piece."""
    for batch, bins_of in zip(cut, bins, strict=True):
        yield _step(request, batch.pieces.tokens, bins_of)


def _step(request: Request, tokens: np.ndarray, bins: np.ndarray) -> Step:
    seconds = micro_batch_s(bins, request.bin_cost.piece_s(tokens), request.bin_cost.empty_s, request.grid)
    return Step(seconds, int(tokens.sum()), int(request.rule.room(tokens).sum()))


# --- the other ways, on one run of the stream


def _run(request: Request, stream: Stream) -> Pieces:
    """Pieces that fill the bins of all steps to the last token, and begin one more."""
    num_bins = request.batches * request.grid.num_bins
    tokens = room = (num_bins + 1) * request.rule.seq_length
    while True:
        run = stream.pieces(stream.start, num_bins, room)
        if int(run.tokens.sum()) > tokens - request.rule.seq_length:
            return run
        room += tokens  # much of it is alignment


def _chopped(request: Request, run: Pieces) -> Iterator[Step]:
    """Documents one behind the other, cut where a bin is full; a token attends to its document's part in the bin alone."""
    tokens, bins = chop(run.tokens, request.rule.seq_length)
    for chosen in _by_step(request, bins):
        step = _step(request, tokens[chosen], bins[chosen] % request.grid.num_bins)
        yield replace(step, room=step.tokens)  # chopping pads nothing


def _undivided(request: Request) -> Iterator[Step]:
    """The same bins, in which every token attends to all before it, as stock Megatron has it."""
    whole = np.full(request.grid.num_bins, request.rule.seq_length)
    return itertools.repeat(_step(request, whole, np.arange(request.grid.num_bins)), request.batches)


def _in_order(request: Request, run: Pieces) -> Iterator[Step]:
    """Whole pieces one behind the other, a new bin where the next does not fit."""
    bins = next_fit(request.rule.room(run.tokens), request.rule.seq_length)
    for chosen in _by_step(request, bins):
        yield _step(request, run.tokens[chosen], bins[chosen] % request.grid.num_bins)


def _by_step(request: Request, bins: np.ndarray) -> Iterator[slice]:
    """Places in ``bins``, which ascend, of one global batch after the other; the last bin may not be full."""
    edges = np.searchsorted(bins, np.arange(request.batches + 1) * request.grid.num_bins)
    return (slice(first, stop) for first, stop in itertools.pairwise(edges))


# --- what there is to say


def _report(request: Request, blend: Blend, found: Study, counted: _Counted, run: Pieces) -> Report:
    judge = judge_of(request.grid)
    totals = [Totals.of(one, request.rule) for one in blend.data_sets]
    whole_cut = _share_split(found.batches)
    cuts = {UNDIVIDED: (chopped := _share_chopped(request, run)), CHOPPED: chopped}
    outcomes = tuple(
        _outcome(request, judge, key, steps, cuts.get(key, whole_cut)) for key, steps in found.steps.items()
    )
    bound_over_ideal, above_bound = _bounded(request, found)
    return Report(
        request=request,
        data_sets=tuple(
            DataSet(one.name, weight, total, total.kept_labels / (weight * counted.tokens))
            for one, weight, total in zip(blend.data_sets, blend.weights, totals, strict=True)
        ),
        histogram=histogram(blend.data_sets),
        tokens_per_batch=counted.tokens,
        documents_per_batch=counted.documents,
        batches_cut=counted.batches,
        fill=counted.fill,
        least_fill=counted.least_fill,
        outcomes=outcomes,
        bound_over_ideal=bound_over_ideal,
        above_bound=above_bound,
        longest_over_mean=float(np.mean([_longest_over_mean(request, batch) for batch in found.batches])),
        fallbacks=sum(placement.method == FALLBACK for placement in found.placements),
    )


def _outcome(request: Request, judge: StepJudge, key: str, steps: Sequence[Step], cut_documents: float) -> Outcome:
    room = np.array([step.room for step in steps]) / (request.grid.num_bins * request.rule.seq_length)
    step_s = sum(judge.step_s(step.seconds) for step in steps)
    costs = [step.seconds.sum(axis=0) for step in steps]  # of each micro-batch, [DP, M]
    return Outcome(
        key=key,
        steps=len(steps),
        fill=float(room.mean()),
        least_fill=float(room.min()),
        cut_documents=cut_documents,
        data_parallel_max_over_mean=float(np.mean([_max_over_mean(cost.sum(axis=1)) for cost in costs])),
        micro_batch_max_over_mean=float(np.mean([_max_over_mean(cost) for cost in costs])),
        step_over_ideal=step_s / sum(judge.ideal_s(step.seconds) for step in steps),
        s_per_token=step_s / sum(step.tokens for step in steps),
    )


def _max_over_mean(costs: np.ndarray) -> float:
    return float(costs.max() / costs.mean())


def _bounded(request: Request, found: Study) -> tuple[float, float]:
    """Bound over ideal, and the share of the step that is above it, over the first steps."""
    topology = request.grid.topology
    operations = 2 * topology.num_stages * topology.num_microbatches
    cut = found.batches[: max(1, _MOST_BOUNDED // operations)]
    bound_s = 0.0
    with progress("bounding the step", len(cut)) as advance:
        for batch in cut:
            bound_s += lower_bound_s(batch.pieces.tokens, request.bin_cost, request.rule, request.grid)
            advance(1)
    placements = found.placements[: len(cut)]
    ideal_s, step_s = (sum(getattr(one, name) for one in placements) for name in ("ideal_s", "step_s"))
    return bound_s / ideal_s, max(0.0, 1 - bound_s / step_s)


def _longest_over_mean(request: Request, batch: GlobalBatch) -> float:
    """Cost of a micro-batch that holds the costliest piece and nothing else, over that of the mean one."""
    bin_cost, topology = request.bin_cost, request.grid.topology
    pieces_s, empty_s = bin_cost.piece_s(batch.pieces.tokens).sum(axis=0), float(bin_cost.empty_s.sum())
    mean_s = (pieces_s.sum() / request.grid.num_bins + empty_s) * topology.micro_batch_size
    return float(pieces_s.max() + empty_s * topology.micro_batch_size) / mean_s


def _share_split(cut: Sequence[GlobalBatch]) -> float:
    """Share of the documents that are in more than one piece."""
    counts = [batch.counts for batch in cut]
    return sum(one.split for one in counts) / max(1, sum(one.documents for one in counts))


def _share_chopped(request: Request, run: Pieces) -> float:
    """The same where pieces are cut wherever a bin is full."""
    parts, _ = chop(run.tokens, request.rule.seq_length)
    piece = np.searchsorted(np.cumsum(run.tokens), np.cumsum(parts) - parts, side="right")
    document = np.empty(len(run), np.int64)
    for data_set in np.unique(run.data_set):
        of_set = run.data_set == data_set  # in which the pieces of a document follow one another, epoch after epoch
        document[of_set] = np.cumsum(run.first[of_set] == 0)
    _, times = np.unique(np.stack((run.data_set, document))[:, piece], axis=1, return_counts=True)
    return float(np.mean(times > 1))
