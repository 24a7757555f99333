"""Rank 0 decides, every rank hears: agreement before any process group exists."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.reporting import global_rank

_TIMEOUT = timedelta(minutes=10)
_stores: list[Any] = []  # without a launcher's store rank 0 serves it; it must live until all have read


def decide_on_rank_0(key: str, decide: Callable[[], str]) -> str:
    """The text that ``decide`` returns on rank 0, on every rank.

    Uses the rendezvous store of `torch.distributed` (`MASTER_ADDR`, `MASTER_PORT`) under a prefix of its own, which leaves
    `init_process_group` as it would have been. A single process decides alone.

    Raises:
        BalanceError: on other ranks, when rank 0 stopped before it decided.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return decide()
    import torch.distributed as dist

    # A launcher's store outlives its workers: another attempt, or another number of them, must not read an old plan.
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{os.environ['WORLD_SIZE']}"
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=_TIMEOUT)))
        _stores.append(store)
        store = dist.PrefixStore(f"megatron_balance/{attempt}", store)
        if global_rank() != 0:
            return store.get(key).decode()
    except RuntimeError as error:
        raise BalanceError(f"rank 0 could not be asked for the pipeline plan; it may have stopped ({error})") from error
    text = decide()
    store.set(key, text)
    return text
