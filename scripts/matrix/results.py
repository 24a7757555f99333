"""What the trials of a checkout gave, and the table of several."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matrix.trials import TRIALS, Trial

TOLERANCE = 2e-6  # relative, as fp32 sums in another order allow


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        losses: of its steps.
        layers: of each rank's chunks.
        error: the line that says why it failed; empty when it did not.
    """

    losses: list[float] | None = None
    layers: list[list[int]] | None = None
    error: str = ""


@dataclass(frozen=True)
class Result:
    """The trials of one checkout.

    Attributes:
        checkout: name of its folder.
        version: that its megatron-core calls itself.
        python: that ran it.
        seconds: all trials took.
        outcomes: by name of the trial.
    """

    checkout: str
    version: str
    python: str
    seconds: float
    outcomes: dict[str, Outcome]

    @classmethod
    def read(cls, file: Path) -> Result:
        fields = json.loads(file.read_text())
        outcomes = {name: Outcome(**outcome) for name, outcome in fields.pop("outcomes").items()}
        return cls(outcomes=outcomes, **fields)

    def difference(self, trial: Trial) -> float | None:
        """Largest relative difference of a loss from the same step of what it is compared with.

        None where either failed, or what gives all of them the same weights.
        """
        losses, reference = self.outcomes[trial.name].losses, self.outcomes[trial.like].losses
        if not losses or not reference or self.outcomes["start"].error:
            return None
        wanted = np.array(reference[-len(losses) :])
        return float(np.max(np.abs(np.array(losses) - wanted) / np.abs(wanted)))  # NaN where a loss is

    def is_without_effect(self, trial: Trial) -> bool:
        """Whether a trial trained as if our flags were not there: equal losses alone would not tell."""
        outcome, chopped = self.outcomes[trial.name], self.outcomes["chopped"].losses
        even = outcome.layers is not None and len({count for rank in outcome.layers for count in rank}) == 1
        same = outcome.losses is not None and chopped is not None and outcome.losses == chopped[-len(outcome.losses) :]
        return (trial.balances and even) or (trial.packs and same)

    @property
    def is_complete(self) -> bool:
        return all(trial.name in self.outcomes for trial in TRIALS)

    @property
    def fails_without_us(self) -> bool:
        """Whether this Megatron does not train on the CPU without our flags, on one stage or on two."""
        return any(self.outcomes[name].error for name in ("start", "chopped", "stock") if name in self.outcomes)


@dataclass(frozen=True)
class Table:
    """The table, and whether all of it is as it should be."""

    markdown: str
    is_sound: bool


def make_table(results: list[Result]) -> Table:
    """Rows of checkouts, columns of features, failures as notes below."""
    columns = [trial for trial in TRIALS if trial.heading]
    notes: list[str] = []
    lines = [["Megatron-LM", "says", "Python", *(trial.heading for trial in columns)]]
    lines.append(["---"] * len(lines[0]))
    is_sound = True
    for result in results:
        python = ".".join(result.python.split(".")[:2])
        cells = [_cell(result, trial, notes) for trial in columns]
        is_sound &= all(_is_sound(result, trial) for trial in columns)
        lines.append([result.checkout, result.version, python, *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return Table("\n".join([table, *(["", *notes] if notes else [])]) + "\n", is_sound)


def _cell(result: Result, trial: Trial, notes: list[str]) -> str:
    error, difference = result.outcomes[trial.name].error, result.difference(trial)
    if result.is_without_effect(trial):
        return "**without effect**"
    if difference is not None:
        text = "0" if difference == 0 else f"{difference:.1e}".replace("e-0", "e-")
        return text if difference <= TOLERANCE else f"**{text}**"
    if not error:
        missing = next(name for name in ("start", trial.like) if result.outcomes[name].error)
        return f"nothing to compare with {_noted(result, missing, notes)}"
    word = "refused" if error.startswith("megatron-balance: error: ") else "fails"
    return f"{word} {_noted(result, trial.name, notes)}"


def _noted(result: Result, name: str, notes: list[str]) -> str:
    """The number of the note that tells a failure, the same one for all that fail alike."""
    error = result.outcomes[name].error.removeprefix("megatron-balance: error: ")
    text = f"`{error.replace('`', chr(39))}`"
    for number, note in enumerate(notes, 1):
        if note.endswith(f" {text}"):
            return f"[{number}]"
    notes.append(f"{len(notes) + 1}. {result.checkout}, {name}: {text}")
    return f"[{len(notes)}]"


def _is_sound(result: Result, trial: Trial) -> bool:
    if result.is_without_effect(trial):
        return False
    difference = result.difference(trial)
    return result.fails_without_us if difference is None else difference <= TOLERANCE
