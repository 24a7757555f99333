"""Before and after: which symptoms went, what was predicted, and what came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron_balance import reading
from megatron_balance.diagnose_command.report import Report, finite, printable
from megatron_balance.diagnosis.result import NO, UNKNOWN, YES
from megatron_balance.errors import BalanceError
from megatron_balance.figures import seconds, signed_percent
from megatron_balance.files import read_text

GONE, STAYS, NEW, ABSENT, UNCLEAR = "gone", "still there", "new", "", "cannot be compared"
_STYLES = {GONE: "bold green", STAYS: "yellow", NEW: "bold red", ABSENT: "", UNCLEAR: "dim"}


@dataclass(frozen=True)
class Summary:
    """What of a report is compared.

    Attributes:
        name: of the job.
        step_s: mean seconds of a step, replayed.
        tokens: mean real tokens of a step; None where that is not known.
        slowdown: S.
        causes: share of the slowdown by cause.
        answers: by (cause, symptom).
        predicted: what each fix promises: (cause and memory, the present step over its, minus 1).
    """

    name: str
    step_s: float
    tokens: float | None
    slowdown: float
    causes: dict[str, float]
    answers: dict[tuple[str, str], str]
    predicted: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Change:
    """A symptom before and after."""

    cause: str
    symptom: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """What became of the symptom."""
        if UNKNOWN in (self.before, self.after):
            return UNCLEAR
        return {(YES, NO): GONE, (YES, YES): STAYS, (NO, YES): NEW}.get((self.before, self.after), ABSENT)

    @property
    def style(self) -> str:
        """In which the name is printed, as rich takes it."""
        return _STYLES[self.name]


@dataclass(frozen=True)
class Comparison:
    """Two reports, one beside the other."""

    before: Summary
    after: Summary

    @property
    def tokens_ratio(self) -> float:
        """Tokens of a step after over those before: packing leaves places of its bins empty. 1 where that is not known."""
        before, after = self.before.tokens, self.after.tokens
        return after / before if before and after else 1.0

    @property
    def gain(self) -> float:
        """Seconds before over seconds after for the same tokens, minus 1."""
        return self.before.step_s / self.after.step_s * self.tokens_ratio - 1

    @property
    def changes(self) -> tuple[Change, ...]:
        """Of all symptoms that either side was asked for."""
        keys = dict.fromkeys((*self.before.answers, *self.after.answers))
        return tuple(
            Change(*key, self.before.answers.get(key, UNKNOWN), self.after.answers.get(key, UNKNOWN)) for key in keys
        )

    def sentences(self) -> Iterator[str]:
        """What came, what was predicted, and how many symptoms went."""
        before, after = self.before, self.after
        slower = "faster" if self.gain >= 0 else "slower"
        tokens = ""
        if self.tokens_ratio != 1.0:
            tokens = f" and its tokens from {before.tokens:,.0f} to {after.tokens:,.0f},"
        yield (
            f"What came: the step went from {seconds(before.step_s)} to {seconds(after.step_s)},{tokens}"
            f" {signed_percent(self.gain)} ({slower}{' for the same tokens' * bool(tokens)});"
            f" S from {before.slowdown:.3f} to {after.slowdown:.3f}"
        )
        if (before.tokens is None) != (after.tokens is None):
            yield "The tokens of a step are known of one side alone: this compares steps, whatever they hold"
        if before.predicted:
            promises = ", ".join(f"{signed_percent(gain)} by {printable(what)}" for what, gain in before.predicted)
            yield f"What was predicted: {promises}"
        else:
            yield "Nothing was predicted: no fix was found before"
        count = {name: sum(change.name == name for change in self.changes) for name in (GONE, STAYS, NEW)}
        yield f"Symptoms: {count[GONE]} gone, {count[STAYS]} still there, {count[NEW]} new"
        if before.name != after.name:
            yield "The jobs have different names: is it the same job?"

    def values(self) -> dict[str, Any]:
        """As JSON: ``gain`` (for the same tokens), ``predicted``, ``changes`` (with ``change``), and both sides in short."""
        return finite(
            {
                "gain": self.gain,
                "predicted": [{"fix": what, "gain": gain} for what, gain in self.before.predicted],
                "changes": [{**asdict(change), "change": change.name or "absent"} for change in self.changes],
                "before": _values(self.before),
                "after": _values(self.after),
            }
        )


def _values(one: Summary) -> dict[str, Any]:
    lost = {cause: share * (one.slowdown - 1) for cause, share in one.causes.items()}
    return {
        "name": one.name,
        "step_s": one.step_s,
        "tokens": one.tokens,
        "S": one.slowdown,
        "causes": one.causes,
        "lost_over_ideal": lost,
    }


def summary_of(report: Report) -> Summary:
    """What of a report is compared."""
    found = report.diagnosis
    return Summary(
        report.name,
        report.step_s,
        report.tokens,
        found.slowdown.slowdown,
        dict(found.causes),
        {(check.cause, check.symptom): check.answer for check in found.checklist},
        tuple((_fix_name(fix.cause, fix.memory, fix.flags), fix.gain) for fix in found.fixes),
    )


def _fix_name(cause: str, memory: str, flags: tuple[str, ...]) -> str:
    more = ", ".join(part for part in (memory, " ".join(flags)) if part)
    return f"{cause} ({more})" if more else cause


def read_summary(path: str) -> Summary:
    """The same of a report that ``--json FILE`` wrote.

    Raises:
        BalanceError: it cannot be read, or is no such report.
    """
    name = f"the report {path}"
    try:
        return _parse(reading.parse_object(read_text(path, name)))
    except reading.DamageError as error:
        raise BalanceError(
            f"{name} {error}: pass a trace, or what `megatron-balance diagnose --json FILE` wrote"
        ) from error


def _parse(values: dict[str, Any]) -> Summary:
    for key, kind in (("job", dict), ("causes", dict), ("steps", list), ("checklist", list), ("fixes", list)):
        reading.checked(values.get(key), key, isinstance(values.get(key), kind), f"a {kind.__name__} of a diagnosis")
    steps = [reading.positive(_entry(step, "steps").get("actual_s"), "steps.actual_s") for step in values["steps"]]
    reading.checked(values["steps"], "steps", bool(steps), "a list of steps")
    answers = {}
    for check in values["checklist"]:
        cause, symptom, answer = (_text(_entry(check, "checklist"), key) for key in ("cause", "symptom", "answer"))
        answers[cause, symptom] = reading.checked(answer, "answer", answer in (YES, NO, UNKNOWN), "an answer")
    predicted = []
    for fix in values["fixes"]:
        flags = _entry(fix, "fixes").get("flags")
        valid = isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)
        reading.checked(flags, "fixes.flags", valid, "a list of flags")
        what = _fix_name(_text(fix, "cause"), _text(fix, "memory"), tuple(flags))
        present_s, predicted_s = (reading.positive(fix.get(key), key) for key in ("present_step_s", "predicted_step_s"))
        predicted.append((what, present_s / predicted_s - 1))
    return Summary(
        printable(_text(values["job"], "name")) or "a job without a name",
        sum(steps) / len(steps),
        None if values.get("tokens") is None else reading.positive(values["tokens"], "tokens"),
        reading.positive(values.get("S"), "S"),
        {name: _share(share, f"causes.{name}") for name, share in values["causes"].items()},
        answers,
        tuple(predicted),
    )


def _entry(value: Any, key: str) -> dict[str, Any]:
    return reading.checked(value, key, isinstance(value, dict), "a list of objects")


def _text(values: dict[str, Any], key: str) -> str:
    return reading.checked(values.get(key), key, isinstance(values.get(key), str), "a text")


def _share(value: Any, key: str) -> float:
    return float(reading.checked(value, key, type(value) in (int, float), "a number"))
