"""The index of a Megatron data set: the lengths in it, and whether it is whole and belongs to its data."""

from __future__ import annotations

import difflib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.files import readable

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the tokens' type, sequences, documents
_VERSION = 1
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # by the code of the tokens' type
REBUILD = "write it anew with Megatron's tools/preprocess_data.py, or copy it again"


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """What ``PREFIX.idx`` says of the sequences in ``PREFIX.bin``.

    The file holds a header, the tokens of each sequence (int32), where each begins in the other file (int64, bytes), the first
    sequence of each document and their end (int64), and, in a multimodal one, a mode of each sequence (int8).

    Attributes:
        prefix: of the two files.
        lengths: tokens of each sequence, int32 of shape [sequences], memory-mapped.
        token_bytes: of each token.
        last_pointer: byte at which the last sequence begins.
        bin_bytes: size of the other file.
    """

    prefix: str
    lengths: np.ndarray
    token_bytes: int
    last_pointer: int
    bin_bytes: int

    @classmethod
    def open(cls, prefix: str) -> MegatronIndex:
        """Map the index of a data set.

        Args:
            prefix: as for ``--data-path``; an ending .idx or .bin is left out.

        Raises:
            BalanceError: a file is missing or cannot be read, is not such an index, or is cut short.
        """
        if not os.path.exists(f"{prefix}.idx"):
            prefix = prefix.removesuffix(".idx").removesuffix(".bin")
        index = Path(f"{prefix}.idx")
        index_bytes, bin_bytes = _size(index, prefix), _size(Path(f"{prefix}.bin"), prefix)
        with readable(index), index.open("rb") as file:
            header = file.read(_HEADER.size)
        token_bytes, sequences, documents = _check_header(index, header)
        _check_size(index, index_bytes, sequences, documents)
        if sequences == 0:
            raise BalanceError(f"{index} holds no documents: pass a data set with at least one")
        with readable(index):
            lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)).view(np.ndarray)
            pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
        return cls(prefix, lengths, token_bytes, int(pointers[-1]), bin_bytes)

    def check_bin(self) -> None:
        """Refuse an index that does not fit the other file; its lengths have been checked.

        Raises:
            BalanceError: the sizes disagree.
        """
        prefix, token_bytes, bin_bytes = self.prefix, self.token_bytes, self.bin_bytes
        index_bytes = int(self.lengths.sum(dtype=np.int64)) * token_bytes
        if index_bytes != bin_bytes:
            raise BalanceError(
                f"{prefix}.bin has {bin_bytes} bytes, but the lengths in {prefix}.idx come to {index_bytes} ({token_bytes} a"
                " token): the two do not belong together or one is cut short; write both anew with Megatron's"
                " tools/preprocess_data.py, or copy them again"
            )
        last_bytes = int(self.lengths[-1]) * token_bytes
        if self.last_pointer + last_bytes != bin_bytes:
            raise BalanceError(
                f"{prefix}.idx is damaged: its last sequence is at byte {self.last_pointer} and has {last_bytes}, but"
                f" {prefix}.bin ends at {bin_bytes}: {REBUILD}"
            )


def _check_header(index: Path, header: bytes) -> tuple[int, int, int]:
    """Bytes of a token, sequences, documents (with the end after the last)."""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        if _MAGIC.startswith(header[: len(_MAGIC)]):
            lacking = _HEADER.size - len(header)
            raise BalanceError(f"{index} is cut short: {lacking} bytes of its header are missing: {REBUILD}")
        raise BalanceError(
            f"{index} is not the index of a Megatron data set (it begins with {header[:9]!r}): {REBUILD}"
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise BalanceError(
            f"{index} is of version {version}, which no Megatron writes; only {_VERSION} is known: {REBUILD}"
        )
    if code not in _TOKEN_BYTES:
        raise BalanceError(f"{index}: the type of its tokens has the code {code}, which is none of 1 to 8: {REBUILD}")
    return _TOKEN_BYTES[code], sequences, documents


def _check_size(index: Path, size: int, sequences: int, documents: int) -> None:
    whole = _HEADER.size + (4 + 8) * sequences + 8 * documents
    counts = f"{sequences} sequences and {documents} document boundaries"
    if size < whole:
        raise BalanceError(
            f"{index} is cut short: {size} bytes, but {counts} take {whole}; {whole - size} are missing: {REBUILD}"
        )
    if size not in (whole, whole + sequences):  # the modes of a multimodal data set
        raise BalanceError(f"{index} is damaged: {size} bytes, but {counts} take {whole}: {REBUILD}")


def _size(path: Path, prefix: str) -> int:
    with readable(path):
        if path.is_file():
            return path.stat().st_size
    if path.suffix == ".bin":
        raise BalanceError(f"{prefix}.idx is there, but {path} is not: a data set is both; copy it too")
    raise BalanceError(f"there is no data set {prefix}: {path} is missing{_similar(path)}")


def _similar(path: Path) -> str:
    """What the folder of a missing index holds instead."""
    folder = path.parent
    if not folder.is_dir():
        return f", and so is its folder {folder}: check the path"
    prefixes = sorted(str(other.with_suffix("")) for other in folder.glob("*.idx") if other.is_file())
    if not prefixes:
        return f"; no file in {folder} ends in .idx: pass the path of a data set without this ending"
    close = difflib.get_close_matches(str(path.with_suffix("")), prefixes, n=3) or prefixes[:3]
    return f"; {folder} has {len(prefixes)}: pass {' or '.join(close)}"
