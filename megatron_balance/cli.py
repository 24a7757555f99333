"""The `megatron-balance` command."""

from __future__ import annotations

import argparse
import sys

from megatron_balance import __version__
from megatron_balance.errors import BalanceError


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2 for a user's mistake)."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.command(options)
    except BalanceError as error:
        print(f"megatron-balance: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-balance", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="what was found of the installed Megatron",
        description="Show which functions of Megatron our flags need and whether this Megatron has them. Exits with 1 where"
        " one is missing.",
    )
    doctor.add_argument(
        "--megatron-path", metavar="DIR", help="a Megatron-LM checkout (default: the installed megatron-core)"
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from megatron_balance.megatron.doctor import examine

    return examine(options.megatron_path)


if __name__ == "__main__":
    sys.exit(main())
