"""The items of a packed data set: one bin each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_balance.megatron.packed.planner import Planner
from megatron_balance.packing.epoch import Epoch
from megatron_balance.packing.pieces import PieceRule

TOKENS, LABELS, POSITIONS, VALID = "tokens", "labels", "position_ids", "loss_mask"
_PADDING = 256  # longest sequence of padding: the attention within it is lost work


class PackedDataset(torch.utils.data.Dataset):
    """The bins in the order in which Megatron's sampler takes them.

    An item holds ``seq_length`` places: the pieces of its bin one behind the other, then padding, in sequences of its own. Its
    tensors, all of shape [seq_length]: ``tokens`` and ``labels`` (int64), ``position_ids`` (int64, from 0 in each sequence)
    and ``loss_mask`` (float32, 1 where a label counts).
    """

    def __init__(
        self,
        planner: Planner | Epoch,
        readers: Sequence[Any],
        rule: PieceRule,
        num_items: int,
        split: Any,
        with_tokens: bool,
    ) -> None:
        """
        Args:
            planner: says what is in a bin.
            readers: of each data set, with ``get(document, offset, length)`` as Megatron's indexed data set has it, numbered
                as its documents.
            rule: of the pieces.
            num_items: length of the data set.
            split: Megatron's ``Split``, by which its loader tells training from evaluation.
            with_tokens: False for ranks that need the positions alone; no token is read then.
        """
        self.planner, self.readers, self.rule = planner, readers, rule
        self.num_items, self.index_split, self.with_tokens = num_items, split, with_tokens
        self._padding = rule.room(_PADDING)

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        pieces = self.planner.pieces(item)
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
                tokens[1, place : place + end - first] = text[1:]
            place += room
        positions[place:] = np.arange(length - place) % self._padding
        values = {POSITIONS: positions, VALID: valid}
        if self.with_tokens:
            values |= {TOKENS: tokens[0], LABELS: tokens[1]}
        return {name: torch.from_numpy(value) for name, value in values.items()}
