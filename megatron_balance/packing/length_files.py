"""Files that list the lengths of documents: JSON, CSV or NumPy's own."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text, readable

ENDINGS = (".json", ".csv", ".npy")
LONGEST = 2**31 - 1
WHOLE = f"a whole number of 0 to {LONGEST}"
_COLUMNS = ("length", "lengths", "tokens", "num_tokens")


def read(name: str) -> np.ndarray:
    """The numbers in a file of lengths, of shape [documents]; of a .npy as they are, else int32.

    Raises:
        BalanceError: the file cannot be read, or something in it is not a length; the message says where.
    """
    reader = {".json": _json_lengths, ".csv": _csv_lengths, ".npy": _npy_lengths}.get(Path(name).suffix)
    if reader is None:
        raise BalanceError(f"{name} is none of {', '.join(ENDINGS)}: pass lengths in one of these")
    return reader(name)


def is_named_so(name: str) -> bool:
    """Whether a name is one of a file of lengths, and not of a Megatron data set."""
    return name.endswith(ENDINGS) and not os.path.exists(f"{name}.idx")


def number_in(word: str) -> float | None:
    """The number that a word is, if it is one."""
    try:
        return float(word)
    except ValueError:
        return None


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
            if row[column].strip()[:1].isalpha() and number_in(row[column]) is None:
                continue  # a heading
        if len(row) != width:
            raise BalanceError(
                f"{name}: line {reader.line_num} has {len(row)} columns, the first line {width}: mend it"
            )
        number = number_in(row[column])
        yield f"line {reader.line_num}", row[column] if number is None else number


def _column(name: str, first_row: Sequence[str]) -> int:
    known = [place for place, heading in enumerate(first_row) if heading.strip().lower() in _COLUMNS]
    if len(first_row) == 1:
        return 0
    if len(known) != 1:
        raise BalanceError(
            f"{name} has {len(first_row)} columns, {len(known)} of them named one of {', '.join(_COLUMNS)}: name exactly"
            " one so, or pass a single column"
        )
    return known[0]


def _npy_lengths(name: str) -> np.ndarray:
    with _opened(name):
        pass
    try:
        with readable(Path(name)):
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
            if type(value) not in (int, float) or not 0 <= value <= LONGEST or value != int(value):
                shown = repr(value)
                shown = shown if len(shown) <= 40 else shown[:37] + "..."
                raise BalanceError(f"{name}: {place} is {shown}, not {WHOLE}")
            yield int(value)

    return np.fromiter(checked(), dtype=np.int32)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """A regular file to read: a pipe would be waited for, and a device may have no end."""
    with readable(Path(name)):
        file = open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
        with file:
            if not os.path.isfile(name):
                raise OSError(errno.EINVAL, "it is not a regular file")
            yield file
