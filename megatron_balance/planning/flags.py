"""Our flags that training and `megatron-balance plan` share, and the values that they may have."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from megatron_balance.errors import BalanceError

FLAG = "--balanced-pipeline"
PROFILE, ANALYTIC = "profile", "analytic"  # costs
ANY, LAST = "any", "last"  # stages of multi-token prediction
UNIFORM = "uniform"
_MOST_LAYERS = 1e6  # as a weight; beyond it the layers vanish in the rounding of sums


@dataclass(frozen=True)
class MemoryWish:
    """What the command line says about memory.

    Attributes:
        gigabytes: that a rank may occupy, in units of 1e9 bytes; None leaves it to the device.
        like: a layout string, or ``uniform``, whose worst rank no other may exceed; None where not given.
    """

    gigabytes: float | None = None
    like: str | None = None

    @property
    def is_given(self) -> bool:
        return self.gigabytes is not None or self.like is not None


def add_memory_arguments(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the two flags that limit memory."""
    group.add_argument(
        f"{FLAG}-memory-gb",
        type=float,
        metavar="G",
        help="Forbid splits under which a rank needs more than G gigabytes (1e9 bytes) by the estimate. Default: what the"
        " device has, minus a reserve of a tenth and 2 GB; no limit on the CPU.",
    )
    group.add_argument(
        f"{FLAG}-memory-like",
        metavar="LAYOUT|uniform",
        help="Forbid splits under which a rank needs more than the worst rank of a layout that is known to fit.",
    )


def memory_wish(gigabytes: float | None, like: str | None) -> MemoryWish:
    """The values of the two flags, checked as far as they can be without the job.

    Raises:
        BalanceError: both are given, or the size is none.
    """
    if gigabytes is not None and like is not None:
        raise BalanceError(f"{FLAG}-memory-gb and {FLAG}-memory-like both limit the memory: leave one out")
    if gigabytes is not None and not 0 < gigabytes < math.inf:
        raise BalanceError(f"{FLAG}-memory-gb {gigabytes}: give the gigabytes that a rank may occupy, more than 0")
    if like == "":
        raise BalanceError(f"{FLAG}-memory-like needs a layout string, or {UNIFORM}")
    return MemoryWish(gigabytes, like)


def layer_weight(flag: str, text: str | None) -> tuple[float, float] | None:
    """The (forward, backward) cost in layers that a weight flag gives; None where it is not given.

    Raises:
        BalanceError: it is no such cost.
    """
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 2) or not all(0 <= value <= _MOST_LAYERS for value in values):
        raise BalanceError(
            f"{flag} {text}: give the cost in layers as one number (5.5) or as forward and backward (9.7,3.8), not negative"
            f" and at most {_MOST_LAYERS:.0e}"
        )
    return values[0], values[-1]
