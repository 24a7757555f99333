"""The order of documents in an epoch: a permutation that never changes, in a file that many processes make once and never read
damaged."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import reporting
from megatron_balance.errors import BalanceError
from megatron_balance.packing.documents import Documents
from megatron_balance.packing.index import epoch_order, order_path
from megatron_balance.packing.kernels import shuffle

ROOT = Path(__file__).parents[1]
COUNT = 300_000
LATE_S = 300.0  # for processes that import Numba and perhaps compile, on a machine that is busy
PROCESS = """
import errno, fcntl, json, os, resource, signal, sys, zlib
from pathlib import Path
import numpy as np
from megatron_balance.errors import BalanceError
from megatron_balance.packing import index
from megatron_balance.packing.documents import Documents

folder, count, trouble, limit = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if trouble in ("full", "killed"):  # Python ignores the signal of a file that grows too large, so that the write fails
    if trouble == "killed":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
if trouble == "no locks":
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = flock
builds, shuffled = 0, index._shuffled
def counted(*arguments):
    global builds
    builds += 1
    return shuffled(*arguments)
index._shuffled = counted
try:
    order = index.epoch_order(Documents.of("data", np.arange(count)), 1, 0, 0, folder, progress=False)
except BalanceError as error:
    print(error)
    sys.exit(2)
print(json.dumps({"builds": builds, "crc32": zlib.crc32(order)}))
"""


def start(folder: Path, trouble: str = "", limit: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(folder), str(COUNT), trouble, str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen) -> dict[str, int]:
    output, errors = process.communicate(timeout=LATE_S)
    assert (process.returncode, errors) == (0, "")
    return json.loads(output)


def documents(count: int = COUNT) -> Documents:
    return Documents.of("data", np.arange(count))


def names(folder: Path) -> list[str]:
    """What a folder holds besides the lock."""
    return sorted(file.name for file in folder.iterdir() if file.name != "epoch-order.lock")


@pytest.fixture
def path(tmp_path) -> Path:
    """The file of an order that was written."""
    epoch_order(documents(), 1, 0, 0, tmp_path)
    path = order_path(documents(), 1, 0, 0, tmp_path)
    assert names(tmp_path) == [path.name]
    return path


# --- the order


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=300),
    seed=st.integers(0, 2**63 - 1),
    place=st.integers(0, 99),
    epoch=st.integers(0, 2**40),
)
def test_each_document_once(lengths, seed, place, epoch):
    order = epoch_order(Documents.of("data", np.array(lengths)), seed, place, epoch, None)
    assert np.sort(order).tolist() == list(range(len(lengths)))


def test_the_order_never_changes():
    """Jobs go on with other versions of this project, of Numba and of NumPy."""
    order = epoch_order(documents(16), 1234, 0, 0, None)
    assert order.dtype == np.uint32 and not order.flags.writeable
    assert order.tolist() == [13, 5, 0, 2, 7, 9, 8, 15, 3, 1, 14, 12, 10, 6, 4, 11]


def test_all_that_it_follows_from():
    """Another seed, place, epoch or data is another order."""
    other_data = Documents.of("data", np.arange(1, 1001))
    of = [(documents(1000), *numbers) for numbers in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 10, 0))]
    orders = {epoch_order(*each, None).tobytes() for each in [*of, (other_data, 1, 0, 0)]}
    assert len(orders) == 6
    same = Documents.of("another name", np.arange(1000))
    assert epoch_order(same, 1, 0, 0, None).tobytes() in orders


def test_all_orders_are_equally_likely():
    """Chi-square of the 120 orders of five documents over 60,000 epochs: within five deviations of its mean."""
    state, counts, draws = np.uint64(0), Counter(), 60_000
    order = np.empty(5, dtype=np.uint32)
    for _ in range(draws):
        state = np.uint64(shuffle(order, state, 0, 5))
        counts[order.tobytes()] += 1
    expected = draws / 120
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 120 and abs(chi_square - 119) < 5 * math.sqrt(2 * 119)


def test_wide_numbers_are_shuffled_alike():
    """2^32 documents and more are uint64; the same draws move them."""
    narrow, wide = np.empty(1000, dtype=np.uint32), np.empty(1000, dtype=np.uint64)
    state = np.uint64(5)
    for first, end in pairwise((0, 1, 400, 1000)):
        state = np.uint64(shuffle(wide, state, first, end))
    assert state == shuffle(narrow, np.uint64(5), 0, 1000)
    assert narrow.tolist() == wide.tolist()


def test_negative_numbers():
    for numbers in ((-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**63, 0, 0)):
        with pytest.raises(BalanceError, match="each must be from 0"):
            epoch_order(documents(3), *numbers, None)


# --- the file


def test_the_file_is_the_order(path):
    def written() -> tuple[int, int]:  # reading may change the time of access
        return path.stat().st_ino, path.stat().st_mtime_ns

    before = written()
    order = epoch_order(documents(), 1, 0, 0, path.parent)
    assert order.tolist() == epoch_order(documents(), 1, 0, 0, None).tolist()
    assert not order.flags.writeable and order.flags.aligned
    assert written() == before
    content = path.read_bytes()
    assert json.loads(content[:512])["documents"] == COUNT
    assert np.frombuffer(content, "<u4", offset=512).tolist() == order.tolist()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:-1], "has 1200511 bytes, not 1200512"),
        (lambda content: content + b"\0", "has 1200513 bytes, not 1200512"),
        (lambda content: content[:100], "is not whole JSON"),
        (lambda content: b"", "is not whole JSON"),
        (lambda content: b"\x93NUMPY" + content[6:], "is not whole JSON"),
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "does not have the checksum"),
        (lambda content: content.replace(b'"crc32": ', b'"crc32": 1', 1), "bytes, not|does not have the checksum"),
        (
            lambda content: content.replace(b'"format_version": 1', b'"format_version": 2'),
            "has format_version 2, not 1",
        ),
        (lambda content: content.replace(b'"seed": 1', b'"seed": 2'), "is the order of other documents"),
        (
            lambda content: content.replace(b"epoch order", b"other thing"),
            "its format is 'megatron_balance other thing'",
        ),
    ],
)
def test_a_damaged_file_is_written_anew(path, capfd, damage, said):
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    order = epoch_order(documents(), 1, 0, 0, path.parent)
    assert order.tobytes() == whole[512:] and path.read_bytes() == whole
    output, errors = capfd.readouterr()
    assert output == "" and errors.count("\n") == 1 and re.search(said, errors) and str(path) in errors
    assert names(path.parent) == [path.name]


def test_a_whole_file_needs_no_writing(path):
    """As in a cache that another user made."""
    lock = path.with_name("epoch-order.lock")
    lock.unlink()
    lock.mkdir()
    assert epoch_order(documents(), 1, 0, 0, path.parent).size == COUNT
    path.unlink()
    with pytest.raises(BalanceError, match="Is a directory"):
        epoch_order(documents(), 1, 0, 0, path.parent)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BalanceError) as refused:
        epoch_order(documents(), 1, 0, 0, tmp_path / "file" / "cache")
    said = str(refused.value)
    assert f"cannot be kept in {tmp_path}/file/cache (Not a directory): it takes 1200512 bytes, " in said
    assert re.search(r"\d+ are free; name a folder that can be written with --data-cache-path", said)


# --- many processes, and their ends


def wait_until(processes: list[subprocess.Popen], waiting_for: Path) -> None:
    """Return when all processes wait for the lock on a file."""
    inode = f":{waiting_for.stat().st_ino} "
    give_up_s = time.monotonic() + LATE_S
    while time.monotonic() < give_up_s:
        waiting = [
            line.split()
            for line in Path("/proc/locks").read_text().splitlines()
            if "-> FLOCK" in line and inode in line
        ]
        if {words[5] for words in waiting} >= {str(process.pid) for process in processes}:
            return
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.01)
    raise AssertionError("the processes do not wait for the lock")


def test_processes_that_start_together_write_it_once(tmp_path):
    lock = tmp_path / "epoch-order.lock"
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        processes = [start(tmp_path) for _ in range(3)]
        wait_until(processes, lock)
        assert names(tmp_path) == []
    results = [result(process) for process in processes]
    assert sorted(each["builds"] for each in results) == [0, 0, 1]
    assert len({each["crc32"] for each in results}) == 1
    assert names(tmp_path) == [order_path(documents(), 1, 0, 0, tmp_path).name]


def test_without_locks_all_write_the_same(tmp_path):
    results = [result(process) for process in [start(tmp_path, "no locks") for _ in range(2)]]
    assert len({each["crc32"] for each in results}) == 1 and max(each["builds"] for each in results) == 1
    assert names(tmp_path) == [order_path(documents(), 1, 0, 0, tmp_path).name]


def test_a_lock_goes_with_its_holder(tmp_path):
    lock = tmp_path / "epoch-order.lock"
    holding = "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", holding, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        process = start(tmp_path)
        wait_until([process], lock)
    finally:
        holder.kill()
        holder.communicate()
    assert result(process)["builds"] == 1


def test_killed_while_writing(tmp_path):
    """The kernel kills it in the middle of the file; the next one removes what it left, and writes it."""
    killed = start(tmp_path, "killed", limit=4 * COUNT // 2)
    killed.communicate(timeout=LATE_S)
    assert killed.returncode == -signal.SIGXFSZ
    (left,) = names(tmp_path)
    assert left.endswith(".tmp") and 0 < (tmp_path / left).stat().st_size <= 4 * COUNT // 2
    foreign = tmp_path / re.sub(r"(-epoch0)\.[\w-]+\.", r"\1.another-machine.", left)
    foreign.write_text("another machine may still be writing it")

    assert result(start(tmp_path))["builds"] == 1
    name = order_path(documents(), 1, 0, 0, tmp_path).name
    assert names(tmp_path) == sorted([foreign.name, name])

    os.utime(foreign, (0, 0))
    (tmp_path / name).unlink()
    assert result(start(tmp_path))["builds"] == 1
    assert names(tmp_path) == [name]


def test_a_full_disk(tmp_path):
    process = start(tmp_path, "full", limit=4 * COUNT // 2)
    output, _ = process.communicate(timeout=LATE_S)
    assert process.returncode == 2
    assert f"cannot be kept in {tmp_path} (File too large): it takes 1200512 bytes" in output
    assert names(tmp_path) == []


# --- progress


def test_long_work_is_announced_once(capfd, monkeypatch):
    monkeypatch.setattr(reporting, "_PATIENCE_S", -1.0)
    epoch_order(documents(10_000_000), 1, 0, 0, None)
    epoch_order(documents(10), 1, 0, 0, None, progress=False)
    output, errors = capfd.readouterr()
    assert (output, errors) == ("", "megatron-balance: shuffling 10,000,000 documents of data for epoch 0 ...\n")


def test_short_work_is_not_announced(capfd, monkeypatch):
    monkeypatch.setattr(reporting, "_PATIENCE_S", 3600.0)
    epoch_order(documents(10), 1, 0, 0, None)
    assert capfd.readouterr() == ("", "")
