"""What a process of a job tells its user, and how it ends on a mistake of theirs."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError

# torchrun ends all processes as soon as one fails, so rank 0 must be the first to go.
_HOLD_BACK_S = 10.0
_PATIENCE_S = 1.0  # work that takes less is not spoken of


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


@contextlib.contextmanager
def progress(text: str, total: float, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """Show how far long work is, once it has taken a second: a bar on a terminal, elsewhere one line that says ``text``.

    It goes to the standard error output, as what a command prints may be read by a program. The context gives a function to
    call with the work done since the last call.
    """
    start_s, done, update = time.monotonic(), 0.0, None
    with contextlib.ExitStack() as stack:

        def advance(part: float) -> None:
            nonlocal done, update
            done += part
            if shown and update is None and time.monotonic() - start_s > _PATIENCE_S:
                update = _announced(stack, text, total)
            if update is not None:
                update(done)

        yield advance


def _announced(stack: contextlib.ExitStack, text: str, total: float) -> Callable[[float], None]:
    """A function to call with all the work done so far."""
    if not sys.stderr.isatty():
        print(f"megatron-balance: {text} ...", file=sys.stderr, flush=True)
        return lambda done: None
    from rich.console import Console  # not at the start of every rank
    from rich.markup import escape
    from rich.progress import Progress

    bars = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    task = bars.add_task(escape(text), total=total)
    return lambda done: bars.update(task, completed=done)
