"""The documents that there are to pack: their lengths, whatever file holds them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.packing import length_files
from megatron_balance.packing.digest import digest
from megatron_balance.packing.length_files import LONGEST, WHOLE, number_in
from megatron_balance.packing.megatron_index import REBUILD, MegatronIndex
from megatron_balance.packing.pieces import DROP, PieceRule
from megatron_balance.packing.splits import ALL, Part, bounds

_LEAST_SHARE = 1e-12  # of a blend
_CHUNK = 1 << 20  # documents
_FILES = (*length_files.ENDINGS, ".jsonl")


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
                raise BalanceError(f"{name}: length {place} is {lengths[place]}, not {WHOLE}")
            lengths = lengths.astype(np.int32)
        elif lengths.min() < 0:
            place = int(np.argmax(lengths < 0))
            raise BalanceError(f"{name}: length {place} is {lengths[place]}, not {WHOLE}: {REBUILD}")
        lengths = lengths.view()
        lengths.flags.writeable = False
        return cls(name, lengths, digest(lengths))

    def chunks(self) -> Iterator[np.ndarray]:
        """The lengths a million at a time, int32, aligned, so that no more of a large file is in memory."""
        for begin in range(0, self.lengths.size, _CHUNK):
            yield np.array(self.lengths[begin : begin + _CHUNK], np.int32)


def nothing_to_learn(documents: Documents, rule: PieceRule) -> BalanceError:
    """The error about documents that give no piece."""
    dropped = f", or has more than {rule.seq_length + 1}" if rule.long_documents == DROP else ""
    return BalanceError(
        f"{documents.name}: nothing to learn from, each of its {documents.lengths.size} documents has fewer than two"
        f" tokens{dropped}: leave it out"
    )


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
        kept_labels = labels - int((long_labels - rule.kept_labels(long_labels)).sum())
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
        try:
            total = math.fsum(weights)  # Python's own sum of floats is another from 3.12 on
        except OverflowError:
            total = math.inf
        for weight, data_set in zip(weights, data_sets, strict=True):
            if weight / total < _LEAST_SHARE:  # so is all where the total overflows
                raise BalanceError(f"the weight of {data_set.name}, {weight}, is nothing of {total}, all: leave it out")
        return cls(tuple(data_sets), tuple(float(weight / total) for weight in weights))


def read_blend(words: Sequence[str], part: Part = ALL) -> Blend:
    """The blend that Megatron's ``--data-path`` names: ``weight prefix weight prefix ...``, or prefixes alone.

    Prefixes alone weigh as much as they have tokens. Files of lengths may stand for prefixes. Of each data set only the
    documents of a part are taken.

    Raises:
        BalanceError: weights and prefixes do not alternate, or as `read_documents` and `Blend.of`.
    """
    names, weights = parse_data_path(words)
    return Blend.of([read_documents(name, part) for name in names], weights)


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Names and weights in ``words``, the weights None where there are only names."""
    words = [word.strip() for word in words]
    weights = [number_in(word) for word in words[::2]]
    if len(words) % 2 == 0 and None not in weights:
        return words[1::2], weights  # type: ignore[return-value]
    for place, word in enumerate(words):
        if number_in(word) is not None and not _exists(word):
            raise BalanceError(
                f"--data-path: word {place + 1} of {len(words)}, {word!r}, is a number, but weights and prefixes do not"
                " alternate: give WEIGHT PREFIX for every data set, or prefixes alone"
            )
    return words, None


def read_documents(name: str | os.PathLike[str], part: Part = ALL) -> Documents:
    """The documents of a part of a Megatron data set, or of a file of lengths that ends in .json, .csv or .npy.

    Raises:
        BalanceError: as `read_indexed` and `read_lengths`.
    """
    name = os.fspath(name)
    return read_lengths(name, part) if length_files.is_named_so(name) else read_indexed(name, part)


def read_indexed(prefix: str | os.PathLike[str], part: Part = ALL) -> Documents:
    """The documents of the Megatron data set ``PREFIX.idx`` and ``PREFIX.bin``. Only the lengths are read.

    Args:
        prefix: as for ``--data-path``; an ending .idx or .bin is left out.
        part: of the documents.

    Raises:
        BalanceError: a file is missing or cannot be read, is not such an index, is cut short, or does not fit the other.
    """
    index = MegatronIndex.open(os.fspath(prefix))
    documents = _of_part(index.prefix, index.lengths, part)
    index.check_bin()
    return documents


def read_lengths(path: str | os.PathLike[str], part: Part = ALL) -> Documents:
    """The documents of a part of those whose lengths a file lists.

    Args:
        path: a .json (a list, or an object with one list), a .csv (one column, or one named length, lengths, tokens or
            num_tokens), or a .npy of one dimension.

    Raises:
        BalanceError: the file cannot be read, or something in it is not a length; the message says where.
    """
    name = os.fspath(path)
    return _of_part(name, length_files.read(name), part)


def _of_part(name: str, lengths: np.ndarray, part: Part) -> Documents:
    first, stop = bounds(lengths.size, part)
    if lengths.size and first == stop:
        raise BalanceError(
            f"{name} holds {lengths.size} documents, of which this part of --split gets none: give it more, or add documents"
        )
    return Documents.of(name, lengths[first:stop])


def default_cache_folder(documents: Documents) -> Path:
    """Where Megatron would keep what it makes of a data set without ``--data-cache-path``: PREFIX/cache/OWNER."""
    return cache_folder_of(documents.name)


def cache_folder_of(name: str) -> Path:
    """The same by the name of a prefix, of a file of lengths or of a chat file."""
    path = Path(name)
    if name.endswith(_FILES):
        return path.with_suffix("") / "cache" / "megatron_balance"
    return (path.with_name(f"{path.name}.packing") if path.is_file() else path) / "cache" / "megatron_balance"


def _first_wrong(lengths: np.ndarray) -> int | None:
    """Place of the first number that is no length."""
    right = (lengths >= 0) & (lengths < np.float64(LONGEST + 1))  # not in fewer bits: float32 would round the limit up
    if lengths.dtype.kind == "f":
        right &= lengths == np.floor(lengths)
    return None if right.all() else int(np.argmin(right))


def _exists(name: str) -> bool:
    return os.path.exists(name) or os.path.exists(f"{name}.idx")
