"""The parts of ``--split``, against Megatron's own reading of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.packing.splits import MEGATRONS_SPLIT, bounds, parts_of, train_part

numbers = st.one_of(st.integers(0, 1000).map(str), st.floats(0, 1e6).map("{:.4f}".format), st.just(".5"))
splits = st.tuples(st.lists(numbers, min_size=1, max_size=3), st.sampled_from([",", ", ", " ", "/"])).map(
    lambda drawn: drawn[1].join(drawn[0])
)


@given(splits)
def test_parts_are_those_that_megatron_reads(split):
    megatrons = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config", exc_type=ImportError)
    if not any(float(number) for number in split.replace(",", " ").replace("/", " ").split()):
        with pytest.raises(BalanceError, match="give the proportions"):
            parts_of(split)
        return
    vector = megatrons.parse_and_normalize_split(split)
    assert list(parts_of(split)) == megatrons.convert_split_vector_to_split_matrix(vector)


def test_documents_are_dealt_without_a_gap():
    parts = parts_of(MEGATRONS_SPLIT)
    assert [bounds(1000, part) for part in parts] == [(0, 969), (969, 999), (999, 1000)]
    assert parts_of("90,10") == ((0.0, 0.9), (0.9, 1.0), None)
    assert bounds(500, train_part("969,30,1")) == (0, 484)  # 484.5, to the even one


@pytest.mark.parametrize("split", ["", "all", "0,0,0", "1,1,1,1", "1.2.3", "9" * 400])
def test_what_is_no_split_is_refused(split):
    with pytest.raises(BalanceError, match="give the proportions of training") as refusal:
        parts_of(split)
    assert "\n" not in str(refusal.value)
