"""The items of a packed data set: one bin each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_balance.megatron.packed.planner import Planner
from megatron_balance.packing.epoch import Epoch
from megatron_balance.packing.pieces import PieceRule, Pieces

TOKENS, LABELS, POSITIONS, VALID = "tokens", "labels", "position_ids", "loss_mask"
FILLED = "filled"
NOT_COUNTED = -1  # a label that is not to be learned
PADDING = 256  # longest sequence of padding: the attention within it is lost work


class PackedDataset(torch.utils.data.Dataset):
    """The bins in the order in which Megatron's sampler takes them.

    An item holds ``seq_length`` places: the pieces of its bin one behind the other, then padding, in sequences of its own. Its
    tensors, all of shape [seq_length]: ``tokens`` and ``labels`` (int64), ``position_ids`` (int64, from 0 in each sequence)
    and ``loss_mask`` (float32, 1 where there is a label). A label that is not to be learned, as of what a user says, is -1.

    With ``variable`` all are of shape [slots, seq_length], and ``filled`` (int64, [slots]) says how many places hold pieces. An
    item has a second slot where a step has more micro-batches than the sampler knows of.

    In training an item also says a few numbers of its global batch, as `totals_of` has them.
    """

    def __init__(
        self,
        planner: Planner | Epoch,
        readers: Sequence[Any],
        rule: PieceRule,
        num_items: int,
        split: Any,
        with_tokens: bool,
        variable: bool = False,
        extra: bool = False,
        totals: Callable[[int], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """
        Args:
            planner: says what is in a bin.
            readers: of each data set, with ``get`` and ``counted`` as `Source` has them.
            rule: of the pieces.
            num_items: length of the data set.
            split: Megatron's ``Split``, by which its loader tells training from evaluation.
            with_tokens: False for ranks that need the positions alone; no token is read then.
            variable: whether micro-batches are cut to their length.
            extra: whether items have a second slot; the planner then has ``extra_pieces``.
            totals: what an item says besides, by its number.
        """
        self.planner, self.readers, self.rule = planner, readers, rule
        self.num_items, self.index_split, self.with_tokens = num_items, split, with_tokens
        self.variable, self.extra, self._totals = variable, extra, totals
        self._padding = rule.room(PADDING)

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        said = {} if self._totals is None else self._totals(item)
        return {**self._slots(item), **{name: torch.from_numpy(value) for name, value in said.items()}}

    def _slots(self, item: int) -> dict[str, torch.Tensor]:
        first = self._bin(self.planner.pieces(item))
        if not self.variable:
            return first
        slots = [first, self._bin(self.planner.extra_pieces(item))] if self.extra else [first]
        return {name: torch.stack([slot[name] for slot in slots]) for name in first}

    def _bin(self, pieces: Pieces) -> dict[str, torch.Tensor]:
        length = self.rule.seq_length
        positions, valid = np.empty(length, dtype=np.int64), np.zeros(length, dtype=np.float32)
        tokens = np.zeros((2, length), dtype=np.int64)
        place = 0
        for data_set, document, first, end, room in zip(
            pieces.data_set, pieces.document, pieces.first, pieces.end, self.rule.room(pieces.tokens), strict=True
        ):
            positions[place : place + room] = np.arange(room)
            valid[place : place + end - first] = 1.0
            if self.with_tokens:
                text = self.readers[data_set].get(int(document), int(first), int(end - first) + 1)
                tokens[0, place : place + end - first] = text[:-1]
                counted = self.readers[data_set].counted(int(document), int(first) + 1, int(end - first))
                tokens[1, place : place + end - first] = np.where(counted, text[1:].astype(np.int64), NOT_COUNTED)
            place += room
        positions[place:] = np.arange(length - place) % self._padding
        values = {POSITIONS: positions, VALID: valid}
        if self.with_tokens:
            values |= {TOKENS: tokens[0], LABELS: tokens[1]}
        if self.variable:
            values[FILLED] = np.array(place)
        return {name: torch.from_numpy(value) for name, value in values.items()}
