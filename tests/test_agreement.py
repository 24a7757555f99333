"""Rank 0 decides for all, whoever serves the store, and `init_process_group` works afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_balance.megatron import agreement

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from forks import held_port

dist = pytest.importorskip("torch.distributed")

WORKER = """
import sys
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.agreement import decide_on_rank_0, gather_on_rank_0
from megatron_balance.reporting import global_rank

def decide():
    assert global_rank() == 0, "only rank 0 decides"
    if sys.argv[1] == "fail":
        raise BalanceError("rank 0 cannot plan")
    return "Ett|tL"

try:
    gathered = gather_on_rank_0("device", f"device of {global_rank()}")
    text = decide_on_rank_0("plan", decide)
except BalanceError as error:
    print(f"error: {error}")
    sys.exit(2)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"{text} {int(total)} {gathered}")
dist.destroy_process_group()
"""


OTHER_DEVICE = """
from megatron_balance.megatron.job_costs import say_devices
say_devices()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """Two ranks in a plain environment, where rank 0 serves the store itself; rank 0 comes last. Rank r has r + 1 threads."""
    with held_port() as held:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": "2"}

        def start(outcome: str, worker: str = WORKER) -> list[subprocess.Popen]:
            ranks = []
            for rank in (1, 0):
                own = {"RANK": str(rank), "OMP_NUM_THREADS": str(rank + 1), "CUDA_VISIBLE_DEVICES": ""}
                command, variables = [sys.executable, "-c", worker, outcome], {**os.environ, **common, **own}
                ranks.append(
                    subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                )
            return ranks[::-1]

        yield start


def test_rank_0_hears_all_and_all_hear_what_it_decides(start):
    heard = ["Ett|tL 2 ['device of 0', 'device of 1']\n", "Ett|tL 2 []\n"]
    for process, expected in zip(start("plan"), heard, strict=True):
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, expected), errors


class Silent:
    """A store in which a key comes after so many waits; rank 0 has given so many signs of life at each."""

    def __init__(self, beats: list[int | None]) -> None:
        self._beats = iter(beats)

    def wait(self, keys, timeout) -> None:
        self.now = next(self._beats)
        if self.now is not None:
            raise RuntimeError("wait timeout")

    def add(self, key: str, amount: int) -> int:
        return self.now

    def get(self, key: str) -> bytes:
        return b"Ett|tL"


def test_rank_0_is_waited_for_while_it_lives():
    assert agreement._heard(Silent([0, 1, 2, None]), "plan") == "Ett|tL"
    with pytest.raises(RuntimeError, match="wait timeout"):
        agreement._heard(Silent([0, 1, 1, None]), "plan")


def test_a_decision_gives_signs_of_life(monkeypatch):
    monkeypatch.setattr(agreement, "_BEAT_S", 0.001)
    store = dist.HashStore()
    give_up_s = time.monotonic() + 60
    with agreement._beating(store, "plan"):
        while store.add("plan/beats", 0) < 3:
            assert time.monotonic() < give_up_s
            time.sleep(0.001)


def test_different_devices_are_said_once(start):
    first, second = (process.communicate(timeout=120)[0] for process in start("", OTHER_DEVICE))
    assert first.startswith(
        "megatron-balance: the ranks have different devices, planned as if all were rank 0's: CPU, "
    )
    assert first.endswith(" threads on rank 1\n") and "1 thread on rank 0; " in first and second == ""


def test_other_ranks_end_soon_when_rank_0_fails(start):
    first, second = start("fail")
    assert first.communicate(timeout=120)[0] == "error: rank 0 cannot plan\n"
    began = time.monotonic()
    assert second.communicate(timeout=120)[0].startswith("error: rank 0 could not be asked")
    assert second.returncode == 2 and time.monotonic() - began < 100  # not the ten minutes of the rendezvous


def test_a_single_process_needs_no_store(monkeypatch):
    from megatron_balance.megatron.agreement import decide_on_rank_0

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert decide_on_rank_0("plan", lambda: "Ett|tL") == "Ett|tL"
