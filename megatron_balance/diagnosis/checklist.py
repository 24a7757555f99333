"""The symptoms by which a cause shows, each with what was measured and from which figure on the answer is yes.

Thresholds have one of three reasons. A job straggles when it is a tenth slower than it could be (the study's definition), so
that what is a tenth above its peers counts, and what costs half of that, ``COUNTS``. Forward and backward passes go together at
a correlation of 0.9 (the study's), if they also vary by ``COUNTS``: two standard deviations of that are the tenth. And a fix
removes a symptom that takes away half of what is lost (the study's M_S and M_W).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_balance.diagnosis.causes import STRAGGLES, Causes
from megatron_balance.diagnosis.costs import RecordedSplit
from megatron_balance.diagnosis.fix import WITHIN
from megatron_balance.diagnosis.result import (
    COMMUNICATION,
    GARBAGE,
    NO,
    SEQUENCE_LENGTHS,
    STAGE_SPLIT,
    UNKNOWN,
    WORKER,
    YES,
    Check,
    Fix,
)
from megatron_balance.diagnosis.signals import COUNTS, Signals, known_sequences
from megatron_balance.diagnosis.trace import Sequences
from megatron_balance.errors import BalanceError

_TOGETHER = 0.9  # correlation from which two things go together; the study's for forward and backward passes
_FOLLOWS = 0.5  # correlation of figures that much else changes, too: a quarter of their variance
_HALF = 0.5
_FULL = 0.95  # tokens of a micro-batch over those of the fullest, from which padding is gone
_ENOUGH = 5  # steps for a correlation over steps
_NO_PASSES = "forward and backward passes run as one in this trace"
_NO_LENGTHS = "the trace does not tell the lengths of all sequences"
_NO_PIPELINE = "there is one stage"
_LENGTHS_COST = f"lengths make the step {1.0 + COUNTS}x as long"


@dataclass(frozen=True, eq=False)
class Checklist:
    """Makes the checks of one trace.

    Attributes:
        causes: of the trace.
        split: the job with its layers; None where they are not known.
        fixes: what is proposed.
    """

    causes: Causes
    split: RecordedSplit | None
    fixes: tuple[Fix, ...]

    def checks(self) -> tuple[Check, ...]:
        """All lines: of the stage split, of sequence lengths, then one for each of the other causes."""
        return (
            self._stages_differ(),
            self._finishes_cluster(),
            self._bubble(),
            self._head(),
            self._removes(STAGE_SPLIT),
            self._follows_longest(),
            self._long_is_slow(),
            self._rate_follows_longest(),
            self._slow_without_padding(),
            self._slow_rank_changes(),
            self._removes(SEQUENCE_LENGTHS),
            self._worker(),
            self._garbage(),
            self._communication(),
        )

    # --- the stage split

    def _stages_differ(self) -> Check:
        symptom = "time per micro-batch varies with the stage"
        if self._signals is None or self._stages == 1:
            return _unknown(STAGE_SPLIT, symptom, _NO_PASSES if self._signals is None else _NO_PIPELINE)
        both = self._signals.median_s.sum(axis=0)
        slowest = int(both.argmax())
        forward, backward = (way[slowest] / np.delete(way, slowest).mean() for way in self._signals.median_s)
        value, name = float(both.max() / both.mean()), self._stage_name(slowest)
        return _above(
            STAGE_SPLIT, symptom,
            f"{name} takes {forward:.2f}x forward and {backward:.2f}x backward of the others' mean, {value:.2f}x of the"
            " mean of all",
            value, STRAGGLES, "the slowest stage at least {}x the mean of all",
        )  # fmt: skip

    def _finishes_cluster(self) -> Check:
        symptom = "gradient-sync finish times cluster around the slowest stage"
        topology = self.causes.replay.trace.job.topology
        if self._signals is None or topology.pipeline_size == 1:
            return _unknown(STAGE_SPLIT, symptom, _NO_PASSES if self._signals is None else _NO_PIPELINE)
        replay, ranks = self.causes.replay, topology.pipeline_size
        busy = self._signals.stage_s.sum(axis=0).reshape(-1, ranks).sum(axis=0)
        last = [self._signals.nodes[:, rank::ranks].ravel() for rank in range(ranks)]
        apart = _distances(replay.end_s, last, busy)
        even = _distances(replay.moments(replay.ideal_s[None, :, None]).end_s, last, busy)
        if even <= 0:
            return _unknown(STAGE_SPLIT, symptom, "all ranks finish at once also where nothing straggles")
        return _check(
            STAGE_SPLIT, symptom,
            f"ranks are done with their gradients {1e3 * apart:.0f} ms from the slowest rank on average, {1e3 * even:.0f} ms with"
            " even stages",
            apart / even, 1.0 - COUNTS, apart / even <= 1.0 - COUNTS, "at most {} of the distance with even stages",
        )  # fmt: skip

    def _bubble(self) -> Check:
        symptom = "the bubble is above the theoretical minimum of this stage count"
        topology = self.causes.replay.trace.job.topology
        if self._signals is None:
            return _unknown(STAGE_SPLIT, symptom, _NO_PASSES)
        bubble = self._signals.bubble(self.causes.replay)
        passes = topology.virtual_size * topology.num_microbatches
        least = (topology.pipeline_size - 1) / (passes + topology.pipeline_size - 1)
        limit = 1.0 - (1.0 - least) / (1.0 + COUNTS)
        return _above(
            STAGE_SPLIT, symptom,
            f"{100 * bubble:.1f} % of the pipeline's time where every pass takes its stage's mean, at least {100 * least:.1f} %",
            bubble, limit, "at least {:.3f}: the pipeline then takes " f"{100 * COUNTS:.0f} % longer than it must",
        )  # fmt: skip

    def _head(self) -> Check:
        symptom = "the head takes a large share of the last stage"
        if self._signals is None or self._stages == 1:
            return _unknown(STAGE_SPLIT, symptom, _NO_PASSES if self._signals is None else _NO_PIPELINE)
        if self.split is None:
            return _unknown(STAGE_SPLIT, symptom, "the layers of each stage are not known (--layers 9,9,9,9)")
        try:
            costs = self.split.costs
        except BalanceError as error:
            return _unknown(STAGE_SPLIT, symptom, str(error))
        forward, backward = costs.in_layers(costs.head)
        value = costs.head.total_s / (costs.head + costs.mean_layer * self.split.layers[-1]).total_s
        both, limit = self._signals.median_s.sum(axis=0), 1.0 - 1.0 / STRAGGLES
        # A split by cost leaves a large head few layers, and no time above the others'.
        beside = float(both[-1] / both.mean())
        return _check(
            STAGE_SPLIT, symptom,
            f"{100 * value:.0f} % of {beside:.2f}x the stages' mean; the head costs {forward:.1f} layers forward,"
            f" {backward:.1f} backward",
            value, limit, value >= limit and beside >= 1.0 + COUNTS,
            "at least {}, in a stage of at least " f"{1.0 + COUNTS}x the mean",
        )  # fmt: skip

    # --- sequence lengths

    def _follows_longest(self) -> Check:
        symptom = "step time follows the longest rather than the mean length"
        lengths = self._lengths
        if lengths is None:
            return _unknown(SEQUENCE_LENGTHS, symptom, _NO_LENGTHS)
        if self._steps < _ENOUGH:
            return _unknown(SEQUENCE_LENGTHS, symptom, f"{self._steps} steps are too few, {_ENOUGH} are needed")
        step_s = self.causes.replay.recorded_step_s
        longest, mean = (
            _correlation(step_s, each) for each in (lengths.longest.max(axis=(1, 2)), lengths.tokens.mean(axis=(1, 2)))
        )
        answer = longest >= _FOLLOWS and longest > mean and self._lengths_cost
        return _check(
            SEQUENCE_LENGTHS, symptom,
            f"correlation of step seconds with the longest sequence {longest:.2f}, with mean tokens {mean:.2f}",
            longest, _FOLLOWS, answer, "at least {}, above that with the mean, and " f"{_LENGTHS_COST}",
        )  # fmt: skip

    def _long_is_slow(self) -> Check:
        symptom = "the micro-batches with the longest documents are the slow ones"
        signals, lengths = self._signals, self._lengths
        if signals is None:
            return _unknown(SEQUENCE_LENGTHS, symptom, _NO_PASSES)
        varied = float(np.median(signals.variation))
        suffix = f", seconds vary by {100 * varied:.1f} % within a step"
        if lengths is not None:
            seconds = (signals.seconds - signals.pause_s).sum(axis=(1, 2))  # [steps, M, lanes]
            value = _correlation(lengths.squares.ravel(), seconds.ravel())
            measured = f"correlation of a micro-batch's seconds with the sum of its squared lengths {value:.2f}{suffix}"
        elif np.isfinite(signals.correlation).any():
            value = float(np.nanmedian(signals.correlation))
            measured = (
                f"{_NO_LENGTHS}; correlation of a worker's forward and backward seconds {value:.2f} (median){suffix}"
            )
        else:
            return _unknown(SEQUENCE_LENGTHS, symptom, "too few micro-batches, or all alike")
        answer = value >= _TOGETHER and varied >= COUNTS
        return _check(
            SEQUENCE_LENGTHS, symptom, measured, value, _TOGETHER, answer,
            "at least {}, and a variation of at least " f"{100 * COUNTS:.0f} %",
        )  # fmt: skip

    def _rate_follows_longest(self) -> Check:
        symptom = "a rank's rate follows its longest document"
        signals, lengths = self._signals, self._lengths
        if signals is None or lengths is None:
            return _unknown(SEQUENCE_LENGTHS, symptom, _NO_PASSES if signals is None else _NO_LENGTHS)
        seconds = (signals.seconds - signals.pause_s).sum(axis=(1, 2, 3))  # [steps, lanes]
        if seconds.size < _ENOUGH:
            return _unknown(
                SEQUENCE_LENGTHS, symptom, f"{seconds.size} steps of ranks are too few, {_ENOUGH} are needed"
            )
        value = _correlation(lengths.tokens.sum(axis=1) / seconds, lengths.longest.max(axis=1))
        return _check(
            SEQUENCE_LENGTHS, symptom, f"correlation of tokens a second with the longest sequence {value:.2f}",
            value, -_FOLLOWS, value <= -_FOLLOWS and self._lengths_cost,
            "at most {}: the longer, the fewer; and " f"{_LENGTHS_COST}",
        )  # fmt: skip

    def _slow_without_padding(self) -> Check:
        symptom = "throughput is down although padding is gone"
        lengths = self._lengths
        if lengths is None:
            return _unknown(SEQUENCE_LENGTHS, symptom, _NO_LENGTHS)
        full = float(lengths.tokens.mean() / max(lengths.tokens.max(), 1))
        value = self.causes.slowdowns[SEQUENCE_LENGTHS]
        return _check(
            SEQUENCE_LENGTHS, symptom,
            f"lengths make the step {value:.2f}x as long, micro-batches are {100 * full:.0f} % as full as the fullest",
            value, 1.0 + COUNTS, value >= 1.0 + COUNTS and full >= _FULL, "at least {}x, " f"{100 * _FULL:.0f} % full",
        )  # fmt: skip

    def _slow_rank_changes(self) -> Check:
        symptom = "the slow rank changes from step to step"
        signals = self._signals
        if signals is None:
            return _unknown(SEQUENCE_LENGTHS, symptom, _NO_PASSES)
        lanes = self.causes.replay.lanes.size
        if lanes == 1 or self._steps < _ENOUGH:
            why = (
                "there is one data-parallel rank"
                if lanes == 1
                else f"{self._steps} steps are too few, {_ENOUGH} are needed"
            )
            return _unknown(SEQUENCE_LENGTHS, symptom, why)
        busy = (signals.seconds - signals.pause_s).sum(axis=(1, 2, 3))
        slowest = busy.argmax(axis=1)
        changes = float((slowest[1:] != slowest[:-1]).mean()) / (1.0 - 1.0 / lanes)
        above = float((busy.max(axis=1) / busy.mean(axis=1)).mean())
        return _check(
            SEQUENCE_LENGTHS, symptom,
            f"it changes {changes:.2f} times as often as by chance, and takes {above:.2f}x the ranks' mean",
            changes, _HALF, changes >= _HALF and above >= 1.0 + COUNTS,
            "at least {}, and " f"{1.0 + COUNTS}x",
        )  # fmt: skip

    # --- the other causes

    def _worker(self) -> Check:
        symptom = "one worker is slower than its row and its column"
        signals = self._signals
        if signals is None or np.isnan(signals.excess).all():
            why = _NO_PASSES if signals is None else "no rank beside it does the same work, or too few do"
            return _unknown(WORKER, symptom, why)
        stage, lane = np.unravel_index(np.nanargmax(signals.excess), signals.excess.shape)
        value = float(signals.excess[stage, lane])
        dp_rank = int(self.causes.replay.lanes[lane])
        rank = int(stage) % self.causes.replay.trace.job.topology.pipeline_size
        return _above(
            WORKER, symptom,
            f"data-parallel rank {dp_rank}, pipeline rank {rank} takes {1 + value:.2f}x what they lead to expect",
            value, signals.excess_limit, "at least {:.3f} more",
        )  # fmt: skip

    def _garbage(self) -> Check:
        symptom = "forward passes pause where backward passes do not"
        signals = self._signals
        if signals is None:
            return _unknown(GARBAGE, symptom, _NO_PASSES)
        value = self.causes.slowdowns[GARBAGE] - 1.0
        count = int((signals.pause_s > 0).sum())
        told = "recorded" if signals.pauses_recorded else "told from passes"
        return _above(
            GARBAGE, symptom,
            f"{count} pauses ({told}) of {1e3 * signals.pause_s.sum() / max(count, 1):.0f} ms, {100 * value:.1f} % of the step",
            value, COUNTS, "at least {} of the step",
        )  # fmt: skip

    def _communication(self) -> Check:
        value = self.causes.slowdowns[COMMUNICATION] - 1.0
        return _above(
            COMMUNICATION, "transfers and collectives take longer than their median",
            f"{100 * value:.1f} % of the step", value, COUNTS, "at least {} of the step",
        )  # fmt: skip

    def _removes(self, cause: str) -> Check:
        """What the fix, or where there is none even stages or lengths, takes away of what is lost."""
        symptom, causes = "the fix removes the symptom", self.causes
        if self._signals is None or (cause == STAGE_SPLIT and self._stages == 1):
            return _unknown(cause, symptom, _NO_PASSES if self._signals is None else _NO_PIPELINE)
        lost_s = causes.actual_s - causes.ideal_s
        if lost_s <= 1e-6 * causes.actual_s:
            return _unknown(cause, symptom, "nothing is lost")
        most_s = causes.actual_s - causes.without_s[cause]
        value = most_s / lost_s
        measured = f"made even, what is lost shrinks by {100 * value:.0f} %"
        proposed = [fix for fix in self.fixes if fix.cause == cause == STAGE_SPLIT and self.split is not None]
        if proposed:
            fix = min(proposed, key=lambda fix: fix.memory != WITHIN)
            value = (fix.present_step_s - fix.predicted_step_s) / lost_s
            measured = f"{100 * value:.0f} % of what is lost goes with the split proposed {fix.memory}; {measured}"
        answer = value >= _HALF and causes.slowdowns[cause] - 1.0 >= COUNTS  # the half of next to nothing is no symptom
        return _check(
            cause, symptom, measured, value, _HALF, answer,
            "at least {} of what is lost goes, and that is " f"{100 * COUNTS:.0f} % of the step",
        )  # fmt: skip

    # --- what they share

    @property
    def _lengths_cost(self) -> bool:
        """Whether lengths hold the job up: time also goes with lengths where all ranks are dealt equal shares of them."""
        return self.causes.slowdowns[SEQUENCE_LENGTHS] >= 1.0 + COUNTS

    @property
    def _signals(self) -> Signals | None:
        return self.causes.signals

    @property
    def _stages(self) -> int:
        return self.causes.replay.trace.job.topology.num_stages

    @property
    def _steps(self) -> int:
        return self.causes.replay.steps.size

    @cached_property
    def _lengths(self) -> Sequences | None:
        return known_sequences(self.causes.replay)

    def _stage_name(self, stage: int) -> str:
        return "the last stage" if stage == self._stages - 1 else f"stage {stage}"


def _distances(end_s: np.ndarray, passes: list[np.ndarray], busy: np.ndarray) -> float:
    """Mean seconds between the end of each pipeline rank's passes and the busiest's, of ends [steps, nodes, lanes]."""
    ends = np.stack([end_s[:, own].max(axis=1) for own in passes])
    return float(np.abs(np.delete(ends, busy.argmax(), axis=0) - ends[busy.argmax()]).mean())


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them is constant."""
    x, y = (np.ravel(each) - np.mean(each) for each in (x, y))
    square = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / square if square > 0 else 0.0


def _check(cause: str, symptom: str, measured: str, value: float, limit: float, answer: bool, threshold: str) -> Check:
    return Check(
        cause, symptom, measured, threshold.format(round(limit, 3)), YES if answer else NO, float(value), float(limit)
    )


def _above(cause: str, symptom: str, measured: str, value: float, limit: float, threshold: str) -> Check:
    return _check(cause, symptom, measured, value, limit, value >= limit, threshold)


def _unknown(cause: str, symptom: str, why: str) -> Check:
    return Check(cause, symptom, why, "", UNKNOWN)
