"""The order of a data set's documents in an epoch: shuffled once, kept on disk, mapped into every process.

The order follows from (seed, place of the data set in the blend, its lengths, epoch) alone. A file of it is a header, one line
of JSON padded to a fixed size, and the numbers of the documents, little-endian: the same bytes whoever writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance import reading
from megatron_balance.errors import BalanceError
from megatron_balance.files import STALE_S, locked_file, remove_left, writing_atomically
from megatron_balance.packing.documents import Documents
from megatron_balance.packing.kernels import shuffle
from megatron_balance.reporting import progress as shown_progress

_FORMAT, _VERSION = "megatron_balance epoch order", 1
_HEADER_BYTES = 512
_SMALL = (
    2**16
)  # documents that are shuffled sooner than a file is opened: of them an order would be kept for each of many epochs
_STEP = 2**22  # documents shuffled or written between two looks at the clock
_LOCK = "epoch-order.lock"


def epoch_order(
    documents: Documents, seed: int, place: int, epoch: int, cache_folder: Path | None, progress: bool = True
) -> np.ndarray:
    """The numbers of all documents in the order of an epoch, read-only, of shape [documents].

    They are uint32, or uint64 for 2^32 documents and more. The first process to come writes the file, in memory of its size; the
    others wait for it. Each checks the whole file before it uses it, and a file that does not pass is written anew.

    Args:
        seed: 0 or more.
        place: of the data set in the blend, from 0.
        epoch: from 0.
        cache_folder: made if it is missing; None keeps the order in memory only, as is that of few documents.
        progress: show how far it is where that takes longer than a second.

    Raises:
        BalanceError: a number is negative, or the folder cannot be written, or is full.
    """
    if min(seed, place, epoch) < 0 or max(seed, place, epoch) >= 2**63:
        raise BalanceError(f"seed {seed}, place {place} and epoch {epoch}: each must be from 0 to 2^63 - 1")
    if cache_folder is None or documents.lengths.size <= _SMALL:
        order = _shuffled(documents, seed, place, epoch, progress)
        order.flags.writeable = False
        return order
    seed, place, epoch = int(seed), int(place), int(epoch)
    path = order_path(documents, seed, place, epoch, cache_folder)
    wanted = _wanted(documents, seed, place, epoch)
    try:
        with contextlib.suppress(FileNotFoundError, reading.DamageError):
            return _mapped(path, wanted)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(path.parent / _LOCK) as locked:
            try:
                return _mapped(path, wanted)  # another process was faster
            except FileNotFoundError:
                pass
            except reading.DamageError as damage:
                print(f"megatron-balance: {path} {damage}; it is written anew", file=sys.stderr, flush=True)
            remove_left(path, STALE_S, locked)
            _write(path, wanted, _shuffled(documents, seed, place, epoch, progress), documents.name, progress)
            return _mapped(path, wanted)
    except OSError as error:
        raise BalanceError(_unwritable(path, documents, error)) from error


def order_path(documents: Documents, seed: int, place: int, epoch: int, cache_folder: Path) -> Path:
    """The file of an order."""
    return Path(cache_folder) / f"epoch-order-{documents.content}-seed{seed}-place{place}-epoch{epoch}"


def _wanted(documents: Documents, seed: int, place: int, epoch: int) -> dict[str, Any]:
    """What the header of the right file says, besides the checksum of its body."""
    count = documents.lengths.size
    return {
        "format": _FORMAT,
        "format_version": _VERSION,
        "documents": count,
        "item_bytes": _dtype(count).itemsize,
        "content": documents.content,
        "seed": seed,
        "place": place,
        "epoch": epoch,
    }


def _dtype(count: int) -> np.dtype:
    return np.dtype("<u4" if count <= 2**32 else "<u8")


def _shuffled(documents: Documents, seed: int, place: int, epoch: int, progress: bool) -> np.ndarray:
    count = documents.lengths.size
    key = f"{documents.content} {seed} {place} {epoch}"
    state = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    order = np.empty(count, dtype=_dtype(count).newbyteorder("="))
    text = f"shuffling {count:,} documents of {documents.name} for epoch {epoch}"
    with shown_progress(text, count, progress) as advance:
        for first in range(0, count, _STEP):
            end = min(first + _STEP, count)
            state = np.uint64(shuffle(order, state, first, end))
            advance(end - first)
    return order


def _write(path: Path, wanted: dict[str, Any], order: np.ndarray, name: str, progress: bool) -> None:
    checksum = zlib.crc32(order.astype(_dtype(order.size), copy=False))
    header = json.dumps({**wanted, "crc32": checksum}).encode().ljust(_HEADER_BYTES - 1) + b"\n"
    with (
        writing_atomically(path) as file,
        shown_progress(f"writing the order of {name} to {path.parent}", order.size, progress) as advance,
    ):
        file.write(header)
        for first in range(0, order.size, _STEP):
            part = order[first : first + _STEP]
            file.write(part.astype(_dtype(order.size), copy=False).data)
            advance(part.size)


def _mapped(path: Path, wanted: dict[str, Any]) -> np.ndarray:
    """The order in a file that is whole and the wanted one.

    Raises:
        DamageError: it is not.
        OSError: it is missing or cannot be read.
    """
    dtype = np.dtype(f"<u{wanted['item_bytes']}")
    whole = _HEADER_BYTES + wanted["documents"] * dtype.itemsize
    with path.open("rb") as file:
        header = reading.parse_object(file.read(_HEADER_BYTES).decode(errors="replace"))
        reading.check_format(header, _FORMAT, _VERSION, "an order of documents")
        checksum = header.pop("crc32", None)
        if header != wanted:
            raise reading.DamageError("is the order of other documents, or of another seed or epoch")
        size = file.seek(0, 2)
        if size != whole:
            raise reading.DamageError(f"has {size} bytes, not {whole}")
        content = mmap.mmap(file.fileno(), whole, access=mmap.ACCESS_READ)
    order = np.frombuffer(content, dtype, wanted["documents"], _HEADER_BYTES)
    if zlib.crc32(order) != checksum:  # half the time of a digest, and nobody gains by forging an order
        raise reading.DamageError("is damaged: its content does not have the checksum in its header")
    return order


def _unwritable(path: Path, documents: Documents, error: OSError) -> str:
    folder, needed = path.parent, _HEADER_BYTES + documents.lengths.size * _dtype(documents.lengths.size).itemsize
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free} are free"
    return (
        f"the order of the documents of {documents.name} cannot be kept in {folder} ({error.strerror or error}): it takes"
        f" {needed} bytes{free}; name a folder that can be written with --data-cache-path"
    )
