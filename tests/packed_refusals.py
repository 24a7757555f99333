"""What `--varlen-packing` says to command lines, parsed by Megatron itself: JSON in and out.

In: ``lines`` and ``attention``, lists of what to ask; the second's of a command line, the compute capability of a GPU, and the
versions of flash-attn and Transformer Engine there. Out: the answers under the same names.
Its parser gets the flags that only Megatron's development branch has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

from megatron_balance import run
from megatron_balance.errors import BalanceError

questions = json.loads(sys.argv[1])
run.prepare(["--device", "cpu", "--varlen-packing"])

from megatron.training.arguments import parse_args  # noqa: E402

from megatron_balance.megatron.packed import hooks  # noqa: E402
from megatron_balance.megatron.packed.backends import Here, Job, Package, chosen  # noqa: E402
from megatron_balance.megatron.packed.options import PackingOptions  # noqa: E402


def add_development(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    with contextlib.suppress(argparse.ArgumentError):  # this Megatron has them
        parser.add_argument("--dynamic-context-parallel", action="store_true")
        parser.add_argument("--sequence-packing-scheduler")
    return parser


def answer(line: str, ask: Callable[[Any], str]) -> str:
    sys.argv[1:] = line.split()
    try:
        return ask(parse_args(add_development))
    except BalanceError as error:
        return f"refused: {error}"
    except SystemExit:
        return "unknown to this Megatron"


def packs(args: Any) -> str:
    if PackingOptions.from_args(args):
        hooks.before_validation(args)
    return ""


def attends(args: Any, capability: str | None, flash: str | None, engine: str | None) -> str:
    here = Here(
        capability and numbers(capability),
        Package(numbers(flash), "") if flash else Package(),
        engine and numbers(engine),
        engine_has_flash=flash is not None,
    )
    choice = chosen(PackingOptions.from_args(args).attention, Job.of(args), here)
    return ": ".join(filter(None, choice))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


answers = {
    "lines": [answer(line, packs) for line in questions["lines"]],
    "attention": [
        answer(f"--varlen-packing {line}", lambda args, there=there: attends(args, *there))
        for line, *there in questions["attention"]
    ],
}
print(json.dumps(answers))
