"""The documents that there are to pack: their lengths, whatever file holds them."""

from __future__ import annotations

import contextlib
import csv
import difflib
import errno
import io
import json
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text
from megatron_balance.packing.digest import digest
from megatron_balance.packing.pieces import DROP, SPLIT, PieceRule

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the tokens' type, sequences, documents
_VERSION = 1
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # by the code of the tokens' type
_LONGEST = 2**31 - 1
_WHOLE = f"a whole number of 0 to {_LONGEST}"
_LEAST_SHARE = 1e-12  # of a blend
_LENGTH_FILES = (".json", ".csv", ".npy")
_LENGTH_COLUMNS = ("length", "lengths", "tokens", "num_tokens")
_REBUILD = "write it anew with Megatron's tools/preprocess_data.py, or copy it again"


@dataclass(frozen=True, eq=False)
class Documents:
    """The lengths of one data set's documents. A document is one sequence of a Megatron index, as in ``GPTDataset``.

    A document of n tokens has n - 1 labels: tokens 0 to n - 2 are inputs, tokens 1 to n - 1 their labels. One of a single
    token, or of none, has nothing to learn from and is never placed.

    Attributes:
        name: prefix (without .idx) or file.
        lengths: tokens of each document, int32 of shape [documents], read-only; may be memory-mapped, and then unaligned.
        content: hexadecimal digest of the lengths; equal lengths have equal digests.
    """

    name: str
    lengths: np.ndarray
    content: str

    @classmethod
    def of(cls, name: str, lengths: np.ndarray) -> Documents:
        """Documents of these lengths, whole numbers of shape [documents].

        Raises:
            BalanceError: there are none, or a length is negative, fractional or above 2^31 - 1.
        """
        lengths = np.ascontiguousarray(lengths)
        if lengths.size == 0:
            raise BalanceError(f"{name} holds no documents: pass a data set with at least one")
        if lengths.dtype != np.int32:
            if (place := _first_wrong(lengths)) is not None:
                raise BalanceError(f"{name}: length {place} is {lengths[place]}, not {_WHOLE}")
            lengths = lengths.astype(np.int32)
        elif lengths.min() < 0:
            place = int(np.argmax(lengths < 0))
            raise BalanceError(f"{name}: length {place} is {lengths[place]}, not {_WHOLE}: {_REBUILD}")
        lengths = lengths.view()
        lengths.flags.writeable = False
        return cls(name, lengths, digest(lengths))


@dataclass(frozen=True)
class Totals:
    """What a data set holds, and how much of it pieces of a rule take.

    Attributes:
        documents, tokens, labels: all that there are; a document of n tokens has n - 1 labels.
        longest_tokens: of the longest document.
        without_labels: documents of one token or none.
        longer_than_bin: documents with more labels than a bin has tokens.
        kept_labels: labels that pieces hold; fewer than ``labels`` where long documents are truncated or dropped.
    """

    documents: int
    tokens: int
    labels: int
    longest_tokens: int
    without_labels: int
    longer_than_bin: int
    kept_labels: int

    @classmethod
    def of(cls, documents: Documents, rule: PieceRule) -> Totals:
        lengths = documents.lengths
        tokens = int(lengths.sum(dtype=np.int64))
        without_labels = int(np.count_nonzero(lengths < 2))
        labels = tokens - lengths.size + int(np.count_nonzero(lengths == 0))
        long_labels = lengths[lengths > rule.seq_length + 1].astype(np.int64) - 1
        kept_labels = labels
        if rule.long_documents != SPLIT:
            kept_each = 0 if rule.long_documents == DROP else rule.seq_length
            kept_labels -= int(long_labels.sum()) - kept_each * long_labels.size
        longest = int(lengths.max())
        return cls(lengths.size, tokens, labels, longest, without_labels, long_labels.size, kept_labels)


@dataclass(frozen=True)
class Blend:
    """Data sets with the share of all *tokens* that each is to give.

    Attributes:
        data_sets: at least one.
        weights: positive, their sum 1.
    """

    data_sets: tuple[Documents, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, data_sets: Sequence[Documents], weights: Sequence[float] | None = None) -> Blend:
        """Blend ``data_sets`` by ``weights`` of any sum, or by their tokens.

        Raises:
            BalanceError: no data sets, a weight that is not a positive number, or a data set without a single label.
        """
        if not data_sets:
            raise BalanceError("no data sets to blend: pass at least one prefix")
        for data_set in data_sets:
            if data_set.lengths.max() < 2:
                raise BalanceError(
                    f"none of the {data_set.lengths.size} documents of {data_set.name} has two tokens or more, so there is"
                    " nothing to learn from: leave it out"
                )
        if weights is None:
            weights = [float(data_set.lengths.sum(dtype=np.int64)) for data_set in data_sets]
        if len(weights) != len(data_sets):
            raise BalanceError(f"{len(weights)} weights for {len(data_sets)} data sets: give one for each")
        for weight, data_set in zip(weights, data_sets, strict=True):
            if not 0 < weight < float("inf"):
                raise BalanceError(f"the weight of {data_set.name} is {weight}: give a number above 0, or leave it out")
        total = sum(weights)
        for weight, data_set in zip(weights, data_sets, strict=True):
            if weight / total < _LEAST_SHARE:  # so is all where the total overflows
                raise BalanceError(f"the weight of {data_set.name}, {weight}, is nothing of {total}, all: leave it out")
        return cls(tuple(data_sets), tuple(float(weight / total) for weight in weights))


def read_blend(words: Sequence[str]) -> Blend:
    """The blend that Megatron's ``--data-path`` names: ``weight prefix weight prefix ...``, or prefixes alone.

    Prefixes alone weigh as much as they have tokens. Files of lengths may stand for prefixes.

    Raises:
        BalanceError: weights and prefixes do not alternate, or as `read_documents` and `Blend.of`.
    """
    names, weights = parse_data_path(words)
    return Blend.of([read_documents(name) for name in names], weights)


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Names and weights in ``words``, the weights None where there are only names."""
    words = [word.strip() for word in words]
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 == 0 and None not in weights:
        return words[1::2], weights  # type: ignore[return-value]
    for place, word in enumerate(words):
        if _number(word) is not None and not _exists(word):
            raise BalanceError(
                f"--data-path: word {place + 1} of {len(words)}, {word!r}, is a number, but weights and prefixes do not"
                " alternate: give WEIGHT PREFIX for every data set, or prefixes alone"
            )
    return words, None


def read_documents(name: str | os.PathLike[str]) -> Documents:
    """The documents of a Megatron data set, or of a file of lengths that ends in .json, .csv or .npy.

    Raises:
        BalanceError: as `read_indexed` and `read_lengths`.
    """
    name = os.fspath(name)
    is_lengths = name.endswith(_LENGTH_FILES) and not os.path.exists(f"{name}.idx")
    return read_lengths(name) if is_lengths else read_indexed(name)


def read_indexed(prefix: str | os.PathLike[str]) -> Documents:
    """The documents of the Megatron data set ``PREFIX.idx`` and ``PREFIX.bin``. Only the lengths are read.

    The index holds a header, the tokens of each sequence (int32), where each begins in the other file (int64, bytes), the first
    sequence of each document and their end (int64), and, in a multimodal one, a mode of each sequence (int8).

    Args:
        prefix: as for ``--data-path``; an ending .idx or .bin is left out.

    Raises:
        BalanceError: a file is missing or cannot be read, is not such an index, is cut short, or does not fit the other.
    """
    prefix = os.fspath(prefix)
    if not os.path.exists(f"{prefix}.idx"):
        prefix = prefix.removesuffix(".idx").removesuffix(".bin")
    index = Path(f"{prefix}.idx")
    index_bytes, bin_bytes = _size(index, prefix), _size(Path(f"{prefix}.bin"), prefix)
    with _explained(index), index.open("rb") as file:
        header = file.read(_HEADER.size)
    token_bytes, sequences, documents = _check_header(index, header)
    _check_size(index, index_bytes, sequences, documents)
    if sequences == 0:
        raise BalanceError(f"{index} holds no documents: pass a data set with at least one")
    with _explained(index):
        lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)).view(np.ndarray)
        pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    result = Documents.of(prefix, lengths)
    _check_bin(prefix, result.lengths, int(pointers[-1]), token_bytes, bin_bytes)
    return result


def read_lengths(path: str | os.PathLike[str]) -> Documents:
    """The documents whose lengths a file lists.

    Args:
        path: a .json (a list, or an object with one list), a .csv (one column, or one named length, lengths, tokens or
            num_tokens), or a .npy of one dimension.

    Raises:
        BalanceError: the file cannot be read, or something in it is not a length; the message says where.
    """
    name = os.fspath(path)
    readers = {".json": _json_lengths, ".csv": _csv_lengths, ".npy": _npy_lengths}
    reader = readers.get(Path(name).suffix)
    if reader is None:
        raise BalanceError(f"{name} is none of {', '.join(_LENGTH_FILES)}: pass lengths in one of these")
    return Documents.of(name, reader(name))


def default_cache_folder(documents: Documents) -> Path:
    """Where Megatron would keep what it makes of a data set without ``--data-cache-path``: PREFIX/cache/OWNER."""
    name = documents.name
    return Path(
        name.removesuffix(Path(name).suffix) if name.endswith(_LENGTH_FILES) else name, "cache", "megatron_balance"
    )


# --- a Megatron index


def _check_header(index: Path, header: bytes) -> tuple[int, int, int]:
    """Bytes of a token, sequences, documents (with the end after the last)."""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        if _MAGIC.startswith(header[: len(_MAGIC)]):
            lacking = _HEADER.size - len(header)
            raise BalanceError(f"{index} is cut short: {lacking} bytes of its header are missing: {_REBUILD}")
        raise BalanceError(
            f"{index} is not the index of a Megatron data set (it begins with {header[:9]!r}): {_REBUILD}"
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise BalanceError(
            f"{index} is of version {version}, which no Megatron writes; only {_VERSION} is known: {_REBUILD}"
        )
    if code not in _TOKEN_BYTES:
        raise BalanceError(f"{index}: the type of its tokens has the code {code}, which is none of 1 to 8: {_REBUILD}")
    return _TOKEN_BYTES[code], sequences, documents


def _check_size(index: Path, size: int, sequences: int, documents: int) -> None:
    whole = _HEADER.size + (4 + 8) * sequences + 8 * documents
    counts = f"{sequences} sequences and {documents} document boundaries"
    if size < whole:
        raise BalanceError(
            f"{index} is cut short: {size} bytes, but {counts} take {whole}; {whole - size} are missing: {_REBUILD}"
        )
    if size not in (whole, whole + sequences):  # the modes of a multimodal data set
        raise BalanceError(f"{index} is damaged: {size} bytes, but {counts} take {whole}: {_REBUILD}")


def _check_bin(prefix: str, lengths: np.ndarray, last_pointer: int, token_bytes: int, bin_bytes: int) -> None:
    index_bytes = int(lengths.sum(dtype=np.int64)) * token_bytes
    if index_bytes != bin_bytes:
        raise BalanceError(
            f"{prefix}.bin has {bin_bytes} bytes, but the lengths in {prefix}.idx come to {index_bytes} ({token_bytes} a token):"
            " the two do not belong together or one is cut short; write both anew with Megatron's tools/preprocess_data.py, or"
            " copy them again"
        )
    last_bytes = int(lengths[-1]) * token_bytes
    if last_pointer + last_bytes != bin_bytes:
        raise BalanceError(
            f"{prefix}.idx is damaged: its last sequence is at byte {last_pointer} and has {last_bytes}, but {prefix}.bin ends"
            f" at {bin_bytes}: {_REBUILD}"
        )


def _size(path: Path, prefix: str) -> int:
    with _explained(path):
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


# --- a file of lengths


def _json_lengths(name: str) -> np.ndarray:
    text = read_text(name, name)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BalanceError(f"{name} is not whole JSON ({error}): pass a list of lengths") from error
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise BalanceError(f"{name} holds an object with {len(lists)} lists: pass one list of lengths")
        values = lists[0]
    if not isinstance(values, list):
        raise BalanceError(f"{name} holds neither a list nor an object with one: pass a list of lengths")
    return _int32(name, ((f"item {place}", value) for place, value in enumerate(values)))


def _csv_lengths(name: str) -> np.ndarray:
    try:
        with _opened(name) as content, io.TextIOWrapper(content, "utf-8-sig", "replace", newline="") as file:
            return _int32(name, _csv_cells(name, csv.reader(file)))
    except csv.Error as error:
        raise BalanceError(f"{name} is not CSV ({error}): pass one length a line") from error


def _csv_cells(name: str, reader: Any) -> Iterator[tuple[str, Any]]:
    """Line and value of each length in a table."""
    column, width = None, 0
    for row in reader:
        if not row:
            continue
        if column is None:
            width, column = len(row), _column(name, row)
            if row[column].strip()[:1].isalpha() and _number(row[column]) is None:
                continue  # a heading
        if len(row) != width:
            raise BalanceError(
                f"{name}: line {reader.line_num} has {len(row)} columns, the first line {width}: mend it"
            )
        number = _number(row[column])
        yield f"line {reader.line_num}", row[column] if number is None else number


def _column(name: str, first_row: Sequence[str]) -> int:
    known = [place for place, heading in enumerate(first_row) if heading.strip().lower() in _LENGTH_COLUMNS]
    if len(first_row) == 1:
        return 0
    if len(known) != 1:
        raise BalanceError(
            f"{name} has {len(first_row)} columns, {len(known)} of them named one of {', '.join(_LENGTH_COLUMNS)}: name exactly"
            " one so, or pass a single column"
        )
    return known[0]


def _npy_lengths(name: str) -> np.ndarray:
    with _opened(name):
        pass
    try:
        with _explained(Path(name)):
            values = np.load(name, mmap_mode="r", allow_pickle=False)
    except BalanceError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BalanceError(f"{name} is not a whole .npy file of numbers ({error}): write it with numpy.save") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iuf":
        shown = f"{values.dtype} of shape {list(values.shape)}" if isinstance(values, np.ndarray) else "an archive"
        raise BalanceError(f"{name} holds {shown}: pass whole numbers of one dimension")
    return values.view(np.ndarray)


def _int32(name: str, values: Iterable[tuple[str, Any]]) -> np.ndarray:
    """The lengths among pairs of a place and a value."""

    def checked() -> Iterator[int]:
        for place, value in values:
            if type(value) not in (int, float) or not 0 <= value <= _LONGEST or value != int(value):
                shown = repr(value)
                shown = shown if len(shown) <= 40 else shown[:37] + "..."
                raise BalanceError(f"{name}: {place} is {shown}, not {_WHOLE}")
            yield int(value)

    return np.fromiter(checked(), dtype=np.int32)


def _first_wrong(lengths: np.ndarray) -> int | None:
    """Place of the first number that is no length."""
    right = (lengths >= 0) & (lengths < np.float64(_LONGEST + 1))  # not in fewer bits: float32 would round the limit up
    if lengths.dtype.kind == "f":
        right &= lengths == np.floor(lengths)
    return None if right.all() else int(np.argmin(right))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _exists(name: str) -> bool:
    return os.path.exists(name) or os.path.exists(f"{name}.idx")


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """A regular file to read: a pipe would be waited for, and a device may have no end."""
    with _explained(Path(name)):
        file = open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
        with file:
            if not os.path.isfile(name):
                raise OSError(errno.EINVAL, "it is not a regular file")
            yield file


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Make a `BalanceError` of a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise BalanceError(f"{path} cannot be read ({error.strerror or error}): pass another") from error
