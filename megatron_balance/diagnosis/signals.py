"""What the passes of a job are made of: their stage, a slow worker, pauses, and the sequences of their micro-batch.

Each recorded pass is taken apart, one cause after the other, in an order in which none is mistaken for another:

1. *Pauses* of the garbage collector hit forward passes alone: a backward pass is launched while the device still works, a
   forward pass waits for Python. Where the recorder noted them, they are taken as noted. Elsewhere a stage's forward seconds
   are predicted from the backward seconds of the same micro-batch; what lies far above that line is a pause.
2. *A slow worker* is above both its row (the same stage on the other data-parallel ranks) and its column (its
   data-parallel rank's other stages), in the median of its passes, so that neither a heavy stage nor long sequences make one.
3. *The stage split* is the mean of a stage, beside the mean of all.
4. *Sequence lengths* make a micro-batch slow or fast on all stages, forward and backward alike. What of the remaining
   variation within a step is common to all passes of a micro-batch is theirs, as far as forward and backward passes
   correlate and, where the trace tells the lengths, as far as these account for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.diagnosis.replay import Moments, Replay, run
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD, PAUSE, Sequences

COUNTS = 0.05  # half of the tenth from which the study says that a job straggles: less is no cause by itself
# Standard deviations, as told from the median deviation: noise of 10 million normal passes does not reach it.
_FAR = 8.0
_APART = 4.0  # standard deviations that a worker must be above what is usual to be named
_ENOUGH_STEPS = 5  # to tell a slow worker from long sequences where its other stages cannot
_MANY_WORKERS = 16  # for their own spread to tell what is usual, even with one of them slow
_NORMAL = 1.4826  # standard deviation over median absolute deviation, of the normal distribution


@dataclass(frozen=True, eq=False)
class Signals:
    """The passes of a job, taken apart. Ways are forward, backward; stage ``chunk * PP + rank`` is a rank's chunk.

    Attributes:
        nodes: place of each pass among the replay's operations, int64 [2, stages, M].
        seconds: of each pass, [steps, 2, stages, M, lanes].
        pause_s: of these, spent in pauses; same shape.
        pauses_recorded: whether pauses are the recorder's or were told from the passes.
        worker_s: that each worker takes more than row and column lead to expect, where it is named; [2, stages, lanes].
        excess: the same in forward and backward together, over what is expected, of every worker; [stages, lanes].
            NaN where it cannot be told.
        excess_limit: above which a worker is named.
        stage_s: mean seconds of each stage without pauses and slow workers, [2, stages].
        length_s: that the micro-batch's sequences make a pass longer, or shorter; shape of ``seconds``.
        correlation: Pearson's, of each worker's forward and backward seconds without pauses, [stages, lanes]; NaN where
            there are fewer than three passes.
        variation: standard deviation over mean of these within a step, forward and backward together, [stages, lanes].
    """

    nodes: np.ndarray
    seconds: np.ndarray
    pause_s: np.ndarray
    pauses_recorded: bool
    worker_s: np.ndarray
    excess: np.ndarray
    excess_limit: float
    stage_s: np.ndarray
    length_s: np.ndarray
    correlation: np.ndarray
    variation: np.ndarray

    @cached_property
    def median_s(self) -> np.ndarray:
        """Median seconds of each stage's passes, [2, stages]."""
        return np.median(self.seconds, axis=(0, 3, 4))

    @cached_property
    def typical_s(self) -> np.ndarray:
        """Seconds of each stage's typical pass, [2, stages]: the median of its workers, of each the median of its passes."""
        return np.median(np.median(self.seconds, axis=(0, 3)), axis=-1)

    def bubble(self, replay: Replay) -> float:
        """Share of the pipeline's time in which its ranks wait, from the first pass to the last, were every pass as long as
        its stage's mean and all else ideal: what lengths, pauses and noise add is no symptom of the split.
        """
        seconds = replay.ideal_s[None, :, None].copy()
        seconds[:, self.nodes] = self.stage_s[:, :, None, None]
        moments = Moments(np.empty_like(seconds), np.empty_like(seconds))
        run(replay.groups, lambda node: seconds[:, node], moments)
        span_s = moments.end_s[:, self.nodes].max() - moments.start_s[:, self.nodes].min()
        return float(1.0 - seconds[:, self.nodes].sum() / replay.trace.job.topology.pipeline_size / span_s)

    @property
    def slow_worker(self) -> tuple[int, int] | None:
        """Stage and lane of the slowest worker that is named."""
        if not self.worker_s.any():
            return None
        stage, lane = np.unravel_index(np.argmax(self.worker_s.sum(axis=0)), self.worker_s.shape[1:])
        return int(stage), int(lane)


def signals_of(replay: Replay) -> Signals | None:
    """Take a job's passes apart; None where forward and backward passes run as one, so that neither is known."""
    nodes = _passes(replay)
    if nodes is None:
        return None
    seconds = replay.actual_s[:, nodes]
    pause_s, recorded = _pauses(replay, nodes, seconds)
    clean = seconds - pause_s
    pipeline_size = replay.trace.job.topology.pipeline_size
    excess_s, excess, limit = _above_row_and_column(clean, pipeline_size)
    worker_s = np.where(excess > limit, np.maximum(excess_s, 0.0), 0.0)
    steady = clean - worker_s[:, :, None]
    stage_s = steady.mean(axis=(0, 3, 4))
    correlation, variation = _together(clean)
    lengths = _lengths(replay)
    length_s = _common(steady, np.nanmean(correlation) if np.isfinite(correlation).any() else 0.0, lengths)
    return Signals(
        nodes, seconds, pause_s, recorded, worker_s, excess, limit, stage_s, length_s, correlation, variation
    )


def _passes(replay: Replay) -> np.ndarray | None:
    """Places of the passes, int64 [2, stages, M]; None where some stage lacks one of a direction."""
    topology, nodes = replay.trace.job.topology, replay.nodes
    places = np.full((2, topology.num_stages, topology.num_microbatches), -1)
    for way, name in enumerate((FORWARD, BACKWARD)):
        mine = np.flatnonzero(nodes.are(name))
        stage = np.maximum(nodes.chunk[mine], 0) * topology.pipeline_size + nodes.stage[mine]
        places[way, stage, nodes.microbatch[mine]] = mine
    return None if (places < 0).any() else places


# --- pauses


def _pauses(replay: Replay, nodes: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, bool]:
    """Seconds of pauses within each pass, and whether the recorder noted them: ours notes all."""
    trace = replay.trace
    rows = np.flatnonzero(trace.are(PAUSE))
    if trace.job.in_turn:
        return replay.paused_s[:, nodes], True
    if (trace.end_s[rows] > trace.start_s[rows]).any():
        return np.minimum(_recorded_pauses(replay, nodes, rows), seconds), True
    pauses = np.zeros_like(seconds)
    pauses[:, 0] = _far_above(seconds[:, 0], seconds[:, 1])
    return pauses, False


def _recorded_pauses(replay: Replay, nodes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Seconds that the noted pauses overlap with each pass of their rank."""
    trace, pauses = replay.trace, np.zeros((replay.steps.size, *nodes.shape, replay.lanes.size))
    ranks = trace.job.topology.pipeline_size
    for row in rows[trace.end_s[rows] > trace.start_s[rows]]:
        step, lane = np.searchsorted(replay.steps, trace.step[row]), np.searchsorted(replay.lanes, trace.dp_rank[row])
        if step == replay.steps.size or replay.steps[step] != trace.step[row]:
            continue
        if lane == replay.lanes.size or replay.lanes[lane] != trace.dp_rank[row]:
            continue
        mine = nodes[:, trace.pp_rank[row] :: ranks]
        last = np.minimum(replay.end_s[step, mine, lane], trace.end_s[row])
        first = np.maximum(replay.start_s[step, mine, lane], trace.start_s[row])
        pauses[step, :, trace.pp_rank[row] :: ranks, :, lane] += np.maximum(last - first, 0.0)
    return pauses


def _far_above(forward_s: np.ndarray, backward_s: np.ndarray) -> np.ndarray:
    """Forward seconds that the backward seconds do not lead to expect, where they are far; all [steps, stages, M, lanes].

    The line through a stage's passes is Tukey's resistant line: through the medians of the third with the shortest and that
    with the longest backward passes, each worker's own medians taken off before.
    """
    above = np.zeros_like(forward_s)
    for stage in range(forward_s.shape[1]):
        forward, backward = forward_s[:, stage], backward_s[:, stage]
        ahead, back = (values - np.median(values, axis=(0, 1)) for values in (forward, backward))
        rest = ahead - _resistant_slope(back.ravel(), ahead.ravel()) * back
        rest -= np.median(rest)
        far = max(_FAR * float(_deviation(rest)), COUNTS * float(np.median(forward)))
        above[:, stage] = np.where(rest > far, rest, 0.0)
    return above


def _resistant_slope(x: np.ndarray, y: np.ndarray) -> float:
    third = x.size // 3
    if third == 0:
        return 0.0
    turn = np.argsort(x, kind="stable")
    low, high = turn[:third], turn[-third:]
    apart = float(np.median(x[high]) - np.median(x[low]))
    return max(0.0, float(np.median(y[high]) - np.median(y[low])) / apart) if apart > 0 else 0.0


# --- workers


def _above_row_and_column(seconds: np.ndarray, pipeline_size: int) -> tuple[np.ndarray, np.ndarray, float]:
    """By how much each worker is above its row and column: seconds [2, stages, lanes], the share, and the limit of that.

    NaN where that cannot be told: without another rank in its row, and in too few steps to tell a worker from its sequences
    without pipeline or, where two rows and two columns leave open which of two opposite workers is slow, by the row that
    differs more: sequences even out over steps.
    """
    steps, stages, lanes = seconds.shape[0], seconds.shape[2], seconds.shape[4]
    two_by_two = lanes == pipeline_size == 2
    if lanes == 1 or ((pipeline_size == 1 or two_by_two) and steps < _ENOUGH_STEPS):
        return np.zeros((2, stages, lanes)), np.full((stages, lanes), np.nan), COUNTS
    typical = np.median(seconds, axis=(0, 3))  # [2, stages, lanes]
    above, row = _above(typical, pipeline_size)
    share = above.sum(axis=0) / row.sum(axis=0)
    if two_by_two:
        apart = np.abs(np.diff(typical.sum(axis=0).reshape(-1, 2, lanes).sum(axis=0), axis=1)[:, 0])
        share[apart.argmin() :: 2] = np.minimum(share[apart.argmin() :: 2], 0.0)
    if share.size < _MANY_WORKERS and steps >= _ENOUGH_STEPS:  # how sure the median over steps is
        of_steps, rows = _above(np.median(seconds, axis=3), pipeline_size)
        shares = of_steps.sum(axis=1) / rows.sum(axis=1)
        spread = float(_deviation(shares, axis=0).max()) * 1.25 / np.sqrt(steps)
    else:
        spread = float(_deviation(share))
    return above, share, max(COUNTS, _APART * spread)


def _above(typical: np.ndarray, pipeline_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [..., stages, lanes] above row and column, and the row's.

    Of two others of a row the faster is the measure, of two of a column the slower: a slow worker then makes neither its row's
    nor its column's others look slow.
    """
    row = _middle_of_others(typical, axis=-1, upper=False)
    above = typical - row
    if pipeline_size > 1:
        by_rank = above.reshape(*above.shape[:-2], -1, pipeline_size, above.shape[-1])
        above = (by_rank - _middle_of_others(by_rank, axis=-2, upper=True)).reshape(above.shape)
    return above, row


def _middle_of_others(values: np.ndarray, axis: int, upper: bool) -> np.ndarray:
    """For each element the median of the others along an axis, of an even number the upper or lower of the middle two."""
    size = values.shape[axis]
    turn = np.argsort(values, axis=axis, kind="stable")
    ranks = np.empty_like(turn)
    shape = [1] * values.ndim
    shape[axis] = size
    np.put_along_axis(ranks, turn, np.broadcast_to(np.arange(size).reshape(shape), turn.shape), axis)
    middle = (size - 1) // 2 if upper else (size - 2) // 2
    place = middle + (ranks <= middle)  # the element itself does not count
    return np.take_along_axis(np.take_along_axis(values, turn, axis), place, axis)


def _deviation(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Standard deviation as told from the median absolute deviation."""
    return _NORMAL * np.median(np.abs(values - np.median(values, axis=axis, keepdims=True)), axis=axis)


# --- sequences


def _together(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Correlation of each worker's forward and backward seconds, and their variation within a step, both [stages, lanes]."""
    centred = seconds - seconds.mean(axis=(0, 3), keepdims=True)
    forward, backward = centred[:, 0], centred[:, 1]
    square = np.sqrt((forward**2).mean(axis=(0, 2)) * (backward**2).mean(axis=(0, 2)))
    product = (forward * backward).mean(axis=(0, 2))
    enough = seconds.shape[0] * seconds.shape[3] >= 3
    correlation = np.full(product.shape, np.nan)
    np.divide(product, square, out=correlation, where=(square > 0) & enough)
    both = seconds.sum(axis=1)  # [steps, stages, M, lanes]
    within = both - both.mean(axis=(2, 3), keepdims=True)
    return correlation, np.sqrt((within**2).mean(axis=(0, 2))) / both.mean(axis=(0, 2))


def known_sequences(replay: Replay) -> Sequences | None:
    """What the micro-batches of the replay's ranks hold, [steps, M, lanes]; None where that of one is not known."""
    sequences = replay.trace.sequences
    if sequences is None:
        return None
    mine = sequences.at(np.s_[:, :, replay.lanes])
    return None if any((values < 0).any() for values in (mine.tokens, mine.longest, mine.squares)) else mine


def _lengths(replay: Replay) -> np.ndarray | None:
    """Tokens and sum of squared lengths of each micro-batch, [2, steps, M, lanes]; None where the trace does not tell."""
    sequences = known_sequences(replay)
    if sequences is None:
        return None
    return np.stack([sequences.tokens, sequences.squares]).astype(float)


def _common(seconds: np.ndarray, correlation: float, lengths: np.ndarray | None) -> np.ndarray:
    """What of each pass is common to its micro-batch, times how far forward and backward passes go together.

    Each way's and stage's variation within a step, in standard deviations, is averaged over all of a micro-batch, and reduced to
    what ``lengths`` [2, steps, M, lanes] account for; each then takes its part of that average by regression. How long a whole
    step takes is left alone: no packing changes that.
    """
    within = _within_step(seconds)
    deviation = np.sqrt((within**2).mean(axis=(0, 3, 4), keepdims=True))
    scaled = np.divide(within, deviation, out=np.zeros_like(within), where=deviation > 0)
    score = scaled.mean(axis=(1, 2), keepdims=True)
    if lengths is not None:
        columns = _within_step(lengths).reshape(2, -1).T
        scales = np.maximum(np.abs(columns).max(axis=0), 1.0)
        weights, *_ = np.linalg.lstsq(columns / scales, score.ravel(), rcond=None)
        score = (columns / scales @ weights).reshape(score.shape)
    power = float((score**2).mean())
    if power == 0.0 or correlation <= 0.0:
        return np.zeros_like(seconds)
    slope = (within * score).mean(axis=(0, 3, 4), keepdims=True) / power
    return correlation * slope * score


def _within_step(values: np.ndarray) -> np.ndarray:
    """Values [..., M, lanes] less the mean of their step."""
    return values - values.mean(axis=(-2, -1), keepdims=True)
