"""A part of a chat file as tokens, on disk: a line of JSON, padded, then lengths, first tokens to learn, tokens.

All numbers are little-endian: int32 lengths and places of the first token to learn [conversations], uint32 tokens [all], whose
highest bit says that the assistant says them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_balance import reading
from megatron_balance.files import writing_atomically

SAID = np.uint32(1 << 31)
_FORMAT, _VERSION = "megatron_balance conversations", 1
_LONGEST_HEADER, _ALIGNMENT = 1 << 16, 64
_SHOWN, _DETAIL = 5, 200  # faults kept of a part; characters of each


@dataclass(frozen=True)
class Span:
    """The bytes ``start`` to ``stop`` of a chat file; the lines that begin there are a part of it."""

    start: int
    stop: int

    def shard(self, folder: Path) -> Path:
        """The file of the part's tokens."""
        return folder / f"shard-{self.start:015d}-{self.stop:015d}"


@dataclass(frozen=True)
class Fault:
    """A line that cannot be trained on.

    Attributes:
        start: byte of the file that it begins with.
        kind, detail: as `LineError` has them.
    """

    start: int
    kind: str
    detail: str


@dataclass(frozen=True, eq=False)
class Part:
    """What a part of a file holds, without the tokens.

    Attributes:
        lengths: tokens of each conversation, int32.
        first_said: place of its first token to learn, int32.
        blank: lines with nothing in them.
        kinds: how many lines have which fault.
        faults: the first of them.
        tokens_start: byte of the shard where tokens begin.
        tokens_crc32: their checksum.
    """

    lengths: np.ndarray
    first_said: np.ndarray
    blank: int
    kinds: dict[str, int]
    faults: tuple[Fault, ...]
    tokens_start: int
    tokens_crc32: int


def write(
    path: Path,
    encoded: Sequence[tuple[np.ndarray, np.ndarray]],
    blank: int,
    kinds: dict[str, int],
    faults: Sequence[Fault],
) -> None:
    """Write a shard of ``encoded``, tokens and which of them are said of each conversation."""
    lengths = np.array([tokens.size for tokens, _ in encoded], "<i4")
    first_said = np.array([int(np.argmax(said)) for _, said in encoded], "<i4")
    flagged = [tokens.astype("<u4") | np.where(said, SAID, np.uint32(0)) for tokens, said in encoded]
    body = np.concatenate([np.empty(0, "<u4"), *flagged]).astype("<u4")
    header = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "conversations": lengths.size,
        "tokens": body.size,
        "lengths_crc32": zlib.crc32(first_said.tobytes(), zlib.crc32(lengths.tobytes())),
        "tokens_crc32": zlib.crc32(body.data),
        "blank": blank,
        "kinds": kinds,
        "faults": [[fault.start, fault.kind, fault.detail[:_DETAIL]] for fault in faults[:_SHOWN]],
    }
    text = json.dumps(header).encode()
    with writing_atomically(path) as file:
        file.write(text.ljust(-(-(len(text) + 1) // _ALIGNMENT) * _ALIGNMENT - 1) + b"\n")
        file.write(lengths.tobytes() + first_said.tobytes())
        file.write(body.data)


def read(path: Path) -> Part:
    """What a shard says of its conversations.

    Raises:
        DamageError: it is damaged.
        OSError: it is missing or cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(_LONGEST_HEADER)
        header = reading.parse_object(line.decode(errors="replace"))
        reading.check_format(header, _FORMAT, _VERSION, "a part of a chat file")
        count, tokens = (reading.count(header.get(key), key) for key in ("conversations", "tokens"))
        body = file.read(8 * count)
        if file.seek(0, 2) != len(line) + 8 * count + 4 * tokens:
            raise reading.DamageError("is cut short")
    if zlib.crc32(body) != header.get("lengths_crc32"):
        raise reading.DamageError("is damaged: its lengths do not have the checksum in its header")
    numbers = np.frombuffer(body, "<i4").reshape(2, -1)
    blank, kinds = reading.count(header.get("blank"), "blank"), header.get("kinds", {})
    try:
        faults = tuple(Fault(*fault) for fault in header.get("faults", ()))
    except TypeError as error:
        raise reading.DamageError("is damaged: its header does not tell which lines are faulty") from error
    if not isinstance(kinds, dict):
        raise reading.DamageError("is damaged: its header does not count faulty lines")
    checksum = reading.count(header.get("tokens_crc32"), "tokens_crc32")
    return Part(numbers[0], numbers[1], blank, kinds, faults, len(line) + 8 * count, checksum)


def tokens_of(path: Path, part: Part, check: bool) -> np.ndarray:
    """The tokens of a shard with their bit, memory-mapped, uint32.

    Raises:
        DamageError: they do not have their checksum.
    """
    count = int(part.lengths.sum(dtype=np.int64))
    if count == 0:
        return np.empty(0, "<u4")
    tokens = np.memmap(path, "<u4", "r", part.tokens_start, count).view(np.ndarray)
    if check and zlib.crc32(tokens.data) != part.tokens_crc32:
        raise reading.DamageError("is damaged: its tokens do not have the checksum in its header")
    return tokens
