"""`python -m reproduce FAILURE`: what `scripts/reproduce_FAILURE_imbalance.sh` runs once Python and the packages are there."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from quickstart import proof, session
from quickstart.proof import Proof, diagnosed, misnamed
from quickstart.session import console, say, stage

from megatron_balance import cli
from megatron_balance.errors import BalanceError
from megatron_balance.files import write_atomically
from reproduce.failures import FAILURES, Failure, Run


def main() -> int:
    options = _options()
    out = options.out or session.REPOSITORY / "reproduce-out" / options.failure
    return session.run(out, lambda folder: _reproduce(FAILURES[options.failure], folder, options.quick))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="reproduce")
    parser.add_argument("failure", choices=FAILURES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _reproduce(failure: Failure, out: Path, quick: bool) -> int:
    began, device = time.monotonic(), session.device()
    alone, in_turns = failure.quick_pairs if quick else failure.pairs
    _clear(out)
    with stage("text of Python's standard library") as progress:
        data = failure.text(out, device, in_turns, progress)
    with stage(f"stock: {failure.job}") as progress:
        (found,) = failure.train(Run(out / "alone", data, device, alone, False), progress)
    _command("diagnose", found)
    missed = misnamed(diagnosed(found), failure.cause, "the stock job alone")
    with stage(f"stock, and with {failure.fix}, in turns, a step each") as progress:
        before, after = failure.train(Run(out / "turns", data, device, in_turns, True), progress)
    _command("diagnose", after)
    _command("diagnose", "--before", before, "--after", after)
    shown = Proof.of(failure.cause, before, after)
    console.print("", proof.table([shown]), "")
    write_atomically(out / "summary.json", json.dumps(shown.to_json(), indent=2) + "\n")
    say(f"{out / 'summary.json'}\nall in {time.monotonic() - began:.0f} s")
    missed += shown.failures()
    for line in missed:
        console.print(f"[bold red]not as it should be[/bold red]: {line}", highlight=False)
    return 1 if missed else 0


def _clear(out: Path) -> None:
    """Remove what an earlier, perhaps interrupted, run left, except corpora."""
    for name in ("alone", "turns"):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "summary.json").unlink(missing_ok=True)


def _command(*words: str | Path) -> None:
    """Run `megatron-balance` as a user would, who sees what was typed.

    Raises:
        BalanceError: it failed.
    """
    text = [str(word) for word in words]
    say(f"\n$ megatron-balance {' '.join(text)}")
    if cli.main(text) != 0:
        raise BalanceError(f"megatron-balance {text[0]} failed (see above)")


if __name__ == "__main__":
    sys.exit(main())
