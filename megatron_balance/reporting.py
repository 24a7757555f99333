"""What a process of a job tells its user, and how it ends on a mistake of theirs."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError

# torchrun ends all processes as soon as one fails, so rank 0 must be the first to go.
_HOLD_BACK_S = 10.0


def global_rank() -> int:
    return int(os.environ.get("RANK", 0))


def stop(error: BalanceError) -> NoReturn:
    """Print ``error`` on rank 0 and exit with status 2.

    Other ranks wait for rank 0 to be heard, after which a launcher ends them; those that live on then say theirs.
    """
    if global_rank() != 0:
        time.sleep(_HOLD_BACK_S)
    print(f"megatron-balance: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def stops_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function`` so that a `BalanceError` ends the process as `stop` does."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BalanceError as error:
            stop(error)

    return call


def say(text: str) -> None:
    """Print ``text`` on rank 0."""
    if global_rank() == 0:
        print(text, flush=True)
