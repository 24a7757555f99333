"""What `--varlen-packing` says to command lines, parsed by Megatron itself: JSON of command lines in, answers out.

Its parser gets the flags that only Megatron's development branch has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from megatron_balance import run
from megatron_balance.errors import BalanceError

lines = json.loads(sys.argv[1])
run.prepare(["--device", "cpu", "--varlen-packing"])

from megatron.training.arguments import parse_args  # noqa: E402

from megatron_balance.megatron.packed import hooks  # noqa: E402
from megatron_balance.megatron.packed.options import PackingOptions  # noqa: E402


def add_development(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    with contextlib.suppress(argparse.ArgumentError):  # this Megatron has them
        parser.add_argument("--dynamic-context-parallel", action="store_true")
        parser.add_argument("--sequence-packing-scheduler")
    return parser


answers = []
for line in lines:
    sys.argv[1:] = line.split()
    try:
        args = parse_args(add_development)
        PackingOptions.from_args(args) and hooks.before_validation(args)
        answers.append("")
    except BalanceError as error:
        answers.append(str(error))
    except SystemExit:
        answers.append("unknown to this Megatron")
print(json.dumps(answers))
