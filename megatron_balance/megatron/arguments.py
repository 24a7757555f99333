"""The flags that we add to Megatron's command line."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from megatron_balance.errors import BalanceError

FLAG = "--balanced-pipeline"


def given_in(argv: list[str]) -> bool:
    """Whether a command line asks for anything of ours."""
    return any(argument.startswith(FLAG) for argument in argv)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the "megatron-balance" group to Megatron's parser."""
    group = parser.add_argument_group(title="megatron-balance")
    group.add_argument(
        FLAG,
        action="store_true",
        help="Give each pipeline stage layers by cost instead of by number: embedding and loss head count as the fractional"
        " layers that they cost. Replaces --pipeline-model-parallel-layout and the first/last-stage and account-for flags;"
        " the losses stay the same.",
    )
    group.add_argument(
        f"{FLAG}-embedding-weight",
        metavar="W|FWD,BWD",
        help="Cost of the embedding in layers, as one number or forward and backward apart, instead of the estimate.",
    )
    group.add_argument(
        f"{FLAG}-head-weight",
        metavar="W|FWD,BWD",
        help="Cost of final norm, output layer and loss in layers, as one number or forward and backward apart, instead of"
        " the estimate.",
    )
    group.add_argument(
        f"{FLAG}-plan",
        metavar="FILE",
        help="Keep the plan in FILE (JSON): reused when it exists and is of this model and topology, written when absent.",
    )
    group.add_argument(
        f"{FLAG}-dry-run",
        type=int,
        nargs="?",
        const=0,
        metavar="WORLD_SIZE",
        help="Print the plan for WORLD_SIZE processes (default: one model replica) and exit, in a single process.",
    )
    return parser


@dataclass(frozen=True)
class Options:
    """Our flags, checked.

    Attributes:
        embedding_weight, head_weight: (forward, backward) cost in layers, None for the estimate.
        plan_file: where the plan is kept, None for nowhere.
        dry_run: processes to plan for without training, 0 for one model replica; None to train.
    """

    embedding_weight: tuple[float, float] | None
    head_weight: tuple[float, float] | None
    plan_file: str | None
    dry_run: int | None

    @classmethod
    def from_args(cls, args: Any) -> Options | None:
        """The options of parsed arguments; None when balancing is not asked for.

        Raises:
            BalanceError: a value is not usable, or an option is given without the flag that it belongs to.
        """
        embedding, head, plan_file, dry_run = (
            getattr(args, f"balanced_pipeline_{name}", None) for name in ("embedding_weight", "head_weight", "plan", "dry_run")
        )
        if not getattr(args, "balanced_pipeline", False):
            given = {"embedding-weight": embedding, "head-weight": head, "plan": plan_file, "dry-run": dry_run}
            for name, value in given.items():
                if value is not None:
                    raise BalanceError(f"{FLAG}-{name} does nothing without {FLAG}: add it or leave both out")
            return None
        if dry_run is not None and dry_run < 0:
            raise BalanceError(f"{FLAG}-dry-run {dry_run}: the number of processes must be positive")
        return cls(
            _weight(f"{FLAG}-embedding-weight", embedding), _weight(f"{FLAG}-head-weight", head), plan_file, dry_run
        )


def _weight(flag: str, text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 2) or not all(math.isfinite(value) and value >= 0 for value in values):
        raise BalanceError(
            f"{flag} {text}: give the cost in layers as one number (5.5) or as forward and backward (9.7,3.8), not negative"
        )
    return values[0], values[-1]
