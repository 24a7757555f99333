"""Rank 0 decides, every rank hears: agreement before any process group exists."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.reporting import global_rank

_TIMEOUT, _BEAT_S = timedelta(minutes=10), 60.0
_alone = False
_stores: list[Any] = []  # without a launcher's store rank 0 serves it; it must live until all have read


def stay_alone() -> None:
    """For a process that takes on the sizes of a job but is none of its ranks: it decides all by itself."""
    global _alone
    _alone = True


def decide_on_rank_0(key: str, decide: Callable[[], str]) -> str:
    """The text that ``decide`` returns on rank 0, on every rank. A single process decides alone.

    Raises:
        BalanceError: on other ranks, when rank 0 stopped before it decided.
    """
    if _world_size() == 1:
        return decide()
    with _asking(f"rank 0 could not be asked for the {key}; it may have stopped"):
        shared = store()
        if global_rank() != 0:
            return _heard(shared, key)
    with _beating(shared, key):
        text = decide()
    shared.set(key, text)
    return text


def _heard(shared: Any, key: str) -> str:
    """What rank 0 says, however long it takes while it lives: to tokenise a large chat file may take an hour.

    Raises:
        RuntimeError: rank 0 has given no sign of life for as long as is waited, or the store is gone.
    """
    beats = -1
    while True:
        try:
            shared.wait([key], _TIMEOUT)
            return shared.get(key).decode()
        except RuntimeError:
            if (now := shared.add(f"{key}/beats", 0)) == beats:
                raise
            beats = now


@contextlib.contextmanager
def _beating(shared: Any, key: str) -> Iterator[None]:
    """Give a sign of life at intervals."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, which the end of the decision says
            while not done.wait(_BEAT_S):
                shared.add(f"{key}/beats", 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def gather_on_rank_0(key: str, text: str) -> list[str]:
    """The texts of all ranks in their order, on rank 0; elsewhere none.

    Raises:
        BalanceError: on rank 0, when another rank stopped before it gave its text.
    """
    if _world_size() == 1:
        return [text]
    with _asking(f"not all ranks have told their {key}; one may have stopped"):
        shared = store()
        if global_rank() != 0:
            shared.set(f"{key}/{global_rank()}", text)
            return []
        return [text, *(shared.get(f"{key}/{rank}").decode() for rank in range(1, _world_size()))]


def said_by_all(shared: Any, keys: list[str], patience: timedelta = timedelta(minutes=2)) -> list[bytes]:
    """What a store holds under ``keys``, each of another rank's.

    A rank that has given up sets none, and its collectives wait for those that wait here: their patience is longer.

    Raises:
        RuntimeError: one has not come in time.
    """
    shared.wait(keys, patience)
    return shared.multi_get(keys)


def _world_size() -> int:
    return 1 if _alone else int(os.environ.get("WORLD_SIZE", 1))


def store() -> Any:
    """The rendezvous store of `torch.distributed` (`MASTER_ADDR`, `MASTER_PORT`) under a prefix of our own.

    `init_process_group` finds it as if we had not been there.
    """
    import torch.distributed as dist

    if not _stores:
        launched, _, _ = next(iter(dist.rendezvous("env://", timeout=_TIMEOUT)))
        _stores.append(launched)
    # A launcher's store outlives its workers: another attempt, or another number of them, must not read an old plan.
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_world_size()}"
    return dist.PrefixStore(f"megatron_balance/{attempt}", _stores[0])


@contextlib.contextmanager
def _asking(failure: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise BalanceError(f"{failure} ({error})") from error
