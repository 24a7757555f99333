"""The conversations of a chat file: tokenised once, kept in a folder, read from there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_balance.chat import shards
from megatron_balance.chat.encoder import Encoder
from megatron_balance.chat.passing import PART_BYTES, spans_of, write_parts
from megatron_balance.chat.shards import Fault, Part, Span
from megatron_balance.errors import BalanceError
from megatron_balance.files import STALE_S, locked_file, readable, remove_left
from megatron_balance.packing.digest import digest
from megatron_balance.reading import DamageError

_LOCK = "conversations.lock"
_SHOWN = 5  # faulty lines that are named
_MOST_OPENED = 64  # shards, each of which holds a file descriptor


@dataclass(frozen=True, eq=False)
class Conversations:
    """Tokenised conversations, in the order of the file.

    Attributes:
        path: the chat file.
        folder: of the shards.
        spans: parts of the file.
        parts: what their shards say.
    """

    path: Path
    folder: Path
    spans: tuple[Span, ...]
    parts: tuple[Part, ...]
    _opened: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    _checked: set[int] = field(default_factory=set, repr=False)

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each, int32 of shape [conversations]."""
        return np.concatenate([part.lengths for part in self.parts])

    @cached_property
    def first_said(self) -> np.ndarray:
        """Place of the first token that the assistant says in each, int32 of shape [conversations]."""
        return np.concatenate([part.first_said for part in self.parts])

    @property
    def blank_lines(self) -> int:
        return sum(part.blank for part in self.parts)

    @cached_property
    def _firsts(self) -> np.ndarray:
        """Number of each part's first conversation."""
        counts = np.array([part.lengths.size for part in self.parts])
        return np.cumsum(counts) - counts

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where the tokens of each conversation begin in its shard."""
        return np.concatenate([np.cumsum(part.lengths, dtype=np.int64) - part.lengths for part in self.parts])

    def get(self, conversation: int, offset: int, length: int) -> np.ndarray:
        """``length`` tokens of a conversation from ``offset`` on."""
        return self._flagged(conversation, offset, length) & ~shards.SAID

    def said(self, conversation: int, offset: int, length: int) -> np.ndarray:
        """Which of these the assistant says, bool."""
        return self._flagged(conversation, offset, length) >= shards.SAID

    def _flagged(self, conversation: int, offset: int, length: int) -> np.ndarray:
        part = int(np.searchsorted(self._firsts, conversation, "right")) - 1
        start = int(self._starts[conversation]) + offset
        return self._tokens(part)[start : start + length]

    def _tokens(self, part: int) -> np.ndarray:
        if part not in self._opened:
            path = self.spans[part].shard(self.folder)
            try:
                with readable(path):  # checked when first touched: nobody reads it all at the start
                    self._opened[part] = shards.tokens_of(path, self.parts[part], check=part not in self._checked)
            except (DamageError, ValueError) as damage:
                raise BalanceError(f"{path} {damage}: remove it and start again, it is then written anew") from damage
            self._checked.add(part)
            if len(self._opened) > _MOST_OPENED:
                del self._opened[next(iter(self._opened))]
        return self._opened[part]


def cache_key(path: Path, encoder: Encoder) -> str:
    """Name of the folder of a chat file's conversations: by content, tokenizer and template.

    Raises:
        BalanceError: the file cannot be read, or is empty.
    """
    with readable(path):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        if path.stat().st_size == 0:
            raise BalanceError(f"{path} is empty: pass a file with a conversation in each line")
        content = digest(np.memmap(path, np.uint8, "r").view(np.ndarray))
    return f"conversations-{content}-{encoder.identity}"


def open_conversations(
    path: Path,
    folder: Path,
    tokenizer: str,
    template: str | None = None,
    workers: int | None = None,
    part_bytes: int = PART_BYTES,
) -> Conversations:
    """The conversations of a chat file, tokenised now where ``folder`` does not hold them yet.

    The first process to come tokenises, the others wait for it. Shards that are damaged are written anew.

    Args:
        path: JSONL.
        folder: of this file, tokenizer and template (`cache_key`); made if it is missing.
        tokenizer, template: as `Encoder.load` takes them.
        workers: processes; default: as many as there are cores.
        part_bytes: of the file, that a shard is of.

    Raises:
        BalanceError: lines cannot be trained on, the message names them; or the folder cannot be written.
    """
    spans = spans_of(path, part_bytes)
    parts = _read(folder, spans)
    if None in parts:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked_file(folder / _LOCK) as locked:
                missing = [span for span, part in zip(spans, _read(folder, spans), strict=True) if part is None]
                for span in missing:
                    remove_left(span.shard(folder), STALE_S, locked)
                if missing:
                    write_parts(path, folder, missing, tokenizer, Encoder.load(tokenizer, template), workers)
        except OSError as error:
            raise BalanceError(
                f"the tokens of {path} cannot be kept in {folder} ({error.strerror or error}), they take about as many bytes as"
                " the file: name a folder that can be written with --data-cache-path"
            ) from error
        parts = _read(folder, spans)
        if None in parts:
            raise BalanceError(f"the tokens of {path} in {folder} do not stay whole: see whether the disk is")
    _refuse_faults(path, parts)
    return Conversations(path, folder, tuple(spans), tuple(parts))


def _read(folder: Path, spans: Sequence[Span]) -> list[Part | None]:
    """The parts in a folder, None for each that is missing or damaged."""
    return [_part(span.shard(folder)) for span in spans]


def _part(path: Path) -> Part | None:
    try:
        return shards.read(path)
    except FileNotFoundError:
        return None
    except (DamageError, ValueError) as damage:
        print(f"megatron-balance: {path} {damage}; it is written anew", file=sys.stderr, flush=True)
        return None


def _refuse_faults(path: Path, parts: Sequence[Part]) -> None:
    kinds = sum((Counter(part.kinds) for part in parts), Counter())
    if not kinds:
        if not any(part.lengths.size for part in parts):
            raise BalanceError(f"{path} holds no conversation: pass a file with one in each line")
        return
    first = [fault for part in parts for fault in part.faults][:_SHOWN]
    named = "; ".join(
        f"line {number}: {fault.kind} ({fault.detail})"
        for number, fault in zip(_line_numbers(path, first), first, strict=True)
    )
    counts = ", ".join(f"{count:,} x {kind}" for kind, count in kinds.most_common())
    raise BalanceError(
        f"{path}: {kinds.total():,} lines cannot be trained on ({counts}): {named}; mend them or take them out"
    )


def _line_numbers(path: Path, faults: Sequence[Fault]) -> list[int]:
    """Line numbers, from 1, of the faults, which are in the order of the file."""
    numbers, place, number = [], 0, 1
    with path.open("rb") as file:
        for fault in faults:
            while place < fault.start:
                chunk = file.read(min(PART_BYTES, fault.start - place))
                number += chunk.count(b"\n")
                place += len(chunk)
            numbers.append(number)
    return numbers
