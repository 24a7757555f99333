"""An epoch for evaluation: every document once, however long, in bins that the ranks can share."""

from __future__ import annotations

import numpy as np
import pytest
from packed_data import blend, pieces_of

from megatron_balance.errors import BalanceError
from megatron_balance.packing.epoch import Epoch
from megatron_balance.packing.pieces import LONG_DOCUMENTS, PieceRule


@pytest.mark.parametrize("policy", LONG_DOCUMENTS)
def test_each_piece_is_in_one_bin_and_no_bin_overflows(policy):
    rng, rule = np.random.default_rng(2), PieceRule(16, long_documents=policy)
    sets = [rng.integers(0, 60, 40), rng.integers(0, 12, 25)]
    epoch = Epoch.of(blend(*sets), rule, multiple=4)
    dealt, held = [], []
    for item in range(epoch.num_bins):
        pieces = epoch.pieces(item)
        dealt += zip(*(values.tolist() for values in vars(pieces).values()), strict=True)
        held.append(int(pieces.tokens.sum()))
    wanted = [
        (number, document, *piece)
        for number, lengths in enumerate(sets)
        for document, length in enumerate(lengths.tolist())
        for piece in pieces_of(length, rule)
    ]
    assert sorted(dealt) == wanted
    assert max(held) <= 16 and epoch.num_bins % 4 == 0 and sum(held[:-4]) > 0.9 * 16 * len(held[:-4])


def test_a_data_set_without_a_piece_is_refused():
    with pytest.raises(BalanceError, match=r"set 1: nothing to learn from.*more than 17: leave it out"):
        Epoch.of(blend([9, 5], [30, 1, 18]), PieceRule(16, long_documents="drop"))
