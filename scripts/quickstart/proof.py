"""Before and after: what the diagnosis of a job says of its trace, with the cause of its slowness and with the fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.table import Table

from megatron_balance.diagnose_command.comparison import Change, Comparison, summary_of
from megatron_balance.diagnose_command.report import Report
from megatron_balance.diagnosis.diagnose import diagnose, recorded_split
from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.diagnosis.result import NO, STAGE_SPLIT, YES

OFF = 0.10  # of the predicted ratio of step times from the measured one, at most


def diagnosed(trace: Path) -> Report:
    """What `megatron-balance diagnose` says of a trace.

    Raises:
        BalanceError: it cannot be read, or has no whole step.
    """
    read = read_trace(trace)
    return Report(read, diagnose(read))


def misnamed(report: Report, cause: str, job: str) -> list[str]:
    """A line where the worst cause that a diagnosis names is another one."""
    verdict = report.diagnosis.verdict
    return [] if verdict[0] == cause else [f"{job} is diagnosed {' and '.join(verdict)}, not {cause}"]


@dataclass(frozen=True, eq=False)
class Proof:
    """The traces of one job, without the fix of a cause and with it, whose steps were trained in turns.

    Attributes:
        cause: what held the job up.
        before, after: its diagnoses.
    """

    cause: str
    before: Report
    after: Report

    @classmethod
    def of(cls, cause: str, before: Path, after: Path) -> Proof:
        """The proof that two traces give."""
        return cls(cause, diagnosed(before), diagnosed(after))

    @cached_property
    def predicted(self) -> float:
        """Step before over step after as predicted from the trace before; 1 where no fix was found.

        For a split, that which was trained; of sequence lengths, of the same tokens.
        """
        before, layers = self.before, self.after.trace.job.layers
        if self.cause == STAGE_SPLIT:
            split = recorded_split(before.trace, before.trace.job.layers)
            return split.step_s / split.step_with_s(layers)
        return next((1 + fix.gain for fix in before.diagnosis.fixes if fix.cause == self.cause), 1.0)

    @cached_property
    def measured(self) -> float:
        """The same by the clock, for the same tokens: packed bins have empty places, and what fills less trains sooner.

        The steps of a split are alike, and the median of pairs withstands disturbances. Steps of other documents are not: they
        even out in all together.
        """
        before_s, after_s = (report.diagnosis.slowdown.recorded_s for report in (self.before, self.after))
        if self.cause == STAGE_SPLIT and before_s.size == after_s.size:
            return float(np.median(before_s / after_s))
        return float(before_s.mean() / after_s.mean() * self.comparison.tokens_ratio)

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @cached_property
    def comparison(self) -> Comparison:
        """As `megatron-balance diagnose --before --after` shows it."""
        return Comparison(summary_of(self.before), summary_of(self.after))

    @cached_property
    def symptoms(self) -> tuple[Change, ...]:
        """Lines of the checklist that said yes before."""
        return tuple(
            change for change in self.comparison.changes if change.cause == self.cause and change.before == YES
        )

    @property
    def stays(self) -> tuple[Change, ...]:
        """Those that do not say no after."""
        return tuple(change for change in self.symptoms if change.after != NO)

    def failures(self) -> Iterator[str]:
        """What of all this is not as it should be, a line each."""
        yield from misnamed(self.before, self.cause, "the job before the fix")
        if not self.symptoms:
            yield f"the diagnosis before shows no symptom of {self.cause}"
        for change in self.stays:
            yield f"the symptom of {self.cause} {change.symptom!r} reads {change.after!r} after the fix"
        if abs(self.off) > OFF:
            yield (
                f"the same tokens take {self.measured:.3f} times as long before as after, {self.predicted:.3f} times was"
                f" predicted: {self.off:+.1%}"
            )

    def to_json(self) -> dict:
        """In short, for a file of results."""
        return {
            "cause": self.cause,
            "verdicts": [list(report.diagnosis.verdict) for report in (self.before, self.after)],
            "slowdowns": [report.diagnosis.slowdown.slowdown for report in (self.before, self.after)],
            "symptoms": len(self.symptoms),
            "symptoms_gone": len(self.symptoms) - len(self.stays),
            "predicted_ratio": self.predicted,
            "measured_ratio": self.measured,
        }


def table(proofs: Sequence[Proof]) -> Table:
    """Several proofs, a column each."""
    result = Table(title="What the diagnosis says before and after", title_style="bold", title_justify="left")
    result.add_column("")
    for proof in proofs:
        result.add_column(proof.cause, justify="right")
    rows = {
        "named before": lambda one: ", ".join(one.before.diagnosis.verdict),
        "named after": lambda one: ", ".join(one.after.diagnosis.verdict),
        "step over one without stragglers": lambda one: " to ".join(
            f"{report.diagnosis.slowdown.slowdown:.3f}" for report in (one.before, one.after)
        ),
        "symptoms gone": lambda one: f"{len(one.symptoms) - len(one.stays)} of {len(one.symptoms)}",
        "seconds before over after, of the same tokens, predicted": lambda one: f"{one.predicted:.3f}",
        "measured": lambda one: f"[bold]{one.measured:.3f}[/bold]",
    }
    for name, cell in rows.items():
        result.add_row(name, *map(cell, proofs))
    return result
