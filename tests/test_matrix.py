"""The table of Megatron versions: what it says of trials that agree, differ, fail and are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from matrix.results import Outcome, Result, make_table  # noqa: E402
from matrix.trials import RESUMED_AT, STEPS, TRIALS  # noqa: E402

HEADINGS = [trial.heading for trial in TRIALS if trial.heading]


def result(**changed: Outcome) -> Result:
    """All trials alike, but for those changed."""
    losses = {packs: [5.0 + packs - 0.1 * step for step in range(STEPS)] for packs in (False, True)}
    layers = {balances: [[3 + balances], [3 - balances]] for balances in (False, True)}
    outcomes = {trial.name: Outcome(losses[trial.packs], layers[trial.balances]) for trial in TRIALS}
    outcomes["resumed"] = Outcome(losses[True][RESUMED_AT:], layers[True])
    return Result("Megatron-LM", "0.19.1", "3.12.3", 60.0, {**outcomes, **changed})


def cells(table) -> dict[str, str]:
    heading, _, row = (line.strip("| ").split(" | ") for line in table.markdown.splitlines()[:3])
    assert heading[3:] == HEADINGS
    return dict(zip(heading, row, strict=True))


def test_equal_losses_differ_by_nothing():
    table = make_table([result()])
    assert table.is_sound and cells(table) == {
        "Megatron-LM": "Megatron-LM", "says": "0.19.1", "Python": "3.12", **dict.fromkeys(HEADINGS, "0")
    }  # fmt: skip


@pytest.mark.parametrize(("factor", "text", "sound"), [(1 + 1e-7, "1.0e-7", True), (1 + 1e-4, "**1.0e-4**", False)])
def test_the_largest_difference_is_shown_and_judged(factor, text, sound):
    losses = result().outcomes["both"].losses
    table = make_table([result(both=Outcome([losses[0] * factor, *losses[1:]]))])
    assert cells(table)["both"] == text and table.is_sound == sound
    assert cells(table)["both, resumed"] == "0"  # it is compared with the last steps


def test_flags_without_effect_are_no_agreement():
    even, chopped = Outcome(result().outcomes["stock"].losses, [[3], [3]]), result().outcomes["stock"]
    table = make_table([result(balanced=even, **{"packed-alone": chopped, "packed-fixed": chopped})])
    row = cells(table)
    assert row["balanced"] == row["packed, fixed"] == "**without effect**" and not table.is_sound


def test_a_loss_that_is_no_number_is_no_agreement():
    losses = result().outcomes["both"].losses
    table = make_table([result(both=Outcome([*losses[:-1], float("nan")]))])
    assert cells(table)["both"] == "**nan**" and not table.is_sound


def test_failures_are_told_once_in_notes():
    failure, refusal = Outcome(error="ValueError: `a` is b"), Outcome(error="megatron-balance: error: take 0.14")
    one = result(balanced=failure, both=failure, resumed=refusal)
    table = make_table([one, replace(one, checkout="other")])
    assert not table.is_sound
    row = cells(table)
    assert (row["balanced"], row["both"], row["both, resumed"]) == ("fails [1]", "fails [1]", "refused [2]")
    assert table.markdown.splitlines()[5:] == [
        "1. Megatron-LM, balanced: `ValueError: 'a' is b`", "2. Megatron-LM, resumed: `take 0.14`"
    ]  # fmt: skip


def test_where_stock_fails_nothing_is_held_against_us():
    failure = Outcome(error="RuntimeError: no kernel")
    table = make_table([result(stock=failure, balanced=failure)])
    assert table.is_sound and cells(table)["stock"] == cells(table)["balanced"] == "fails [1]"
    unstarted = make_table([result(start=failure)])
    assert unstarted.is_sound and {cells(unstarted)[heading] for heading in HEADINGS} == {"nothing to compare with [1]"}
    differing = make_table([result(stock=failure, balanced=Outcome([6.0] * STEPS))])
    assert not differing.is_sound


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    script = ["bash", str(ROOT / "scripts/test_matrix.sh"), str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "MEGATRON_BALANCE_MATRIX_PYTHON": sys.executable}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "no pretrain_gpt.py" in done.stderr
