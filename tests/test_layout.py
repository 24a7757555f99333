"""Layout strings: written, read, and the same for Megatron's own parser."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.chain import layer_limits
from megatron_balance.pipeline.layout import Layout, parse_layout

ACCEPTED = [
    "Et|tL",
    "E|ttt|L",
    "E|(t|)*3,L",
    "Ettt|(tt|)*29,m|L",
    "Et*3|(tt|)*29m|L",
    "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL",
    "Et|(tt|)*30mL",
    "Et*4|(t*4|)*14tmL",
    "Ett|t|mmL",
    "E,t||t|L",
    "|Et|tL|",
    "Et|*3tL",
    "EtL",
]


@pytest.mark.parametrize(
    ("layers", "mtp_num_layers", "text"),
    [
        ((5, 5, 4, 2), 0, "Ettttt|ttttt|tttt|ttL"),
        ((0, 2, 0), 0, "E|tt|L"),
        ((2, 1), 2, "Ett|tmmL"),
        ((3,), 1, "EtttmL"),
    ],
)
def test_layout_is_written_out_in_full(layers: tuple[int, ...], mtp_num_layers: int, text: str) -> None:
    layout = Layout.of(layers, mtp_num_layers)
    assert str(layout) == text
    assert parse_layout(text) == layout


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 3))
def test_every_layout_survives_the_round_trip(layers: list[int], mtp_num_layers: int) -> None:
    layout = Layout.of(layers, mtp_num_layers)
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "0 E"),
        ("ttL", "0 E"),
        ("tEL", "1 E.*first letter"),
        ("EEtL", "2 E"),
        ("Et|tLt", "1 L.*last letter"),
        ("Et|t", "0 L"),
        ("EmtL", "t after m"),
        ("Etm|mL", "several stages"),
        ("Et |tL", "' '.*without spaces"),
        ("Et|xL", "'x'"),
        ("E(t(t|)*2)*2L", r"'\)'"),
        ("E(tt|)L", r"'\(', '\)'"),
        ("Et*L", r"'\*'"),
    ],
)
def test_what_megatron_refuses_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(BalanceError, match=complaint):
        parse_layout(text)


# --- against Megatron's own parser


def megatron_layers(text: str, num_stages: int) -> list[tuple[int, int]]:
    """Transformer and multi-token-prediction layers of each stage, as Megatron reads them."""
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    stages = layouts.PipelineParallelLayerLayout.parse_str_to_list(text)
    layout = layouts.PipelineParallelLayerLayout(text, pipeline_model_parallel_size=num_stages)
    layer_type = layouts.LayerType
    counts = [(stage.count(layer_type.decoder), stage.count(layer_type.mtp)) for stage in stages]
    layout.validate_layer_layout(
        num_layers=sum(layers for layers, _ in counts), mtp_num_layers=sum(mtp for _, mtp in counts)
    )
    return counts


@pytest.mark.megatron
@pytest.mark.parametrize("text", ACCEPTED)
def test_strings_mean_what_megatron_reads(text: str) -> None:
    layout = parse_layout(text)
    assert list(zip(layout.layers, layout.mtp, strict=True)) == megatron_layers(text, len(layout.layers))


@pytest.mark.megatron
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(0, 3))
def test_megatron_reads_the_layers_that_were_meant(layers: list[int], mtp_num_layers: int) -> None:
    text = str(Layout.of(layers, mtp_num_layers))
    counts = megatron_layers(text, len(layers))
    assert [decoder for decoder, _ in counts] == layers
    assert [mtp for _, mtp in counts] == [0] * (len(layers) - 1) + [mtp_num_layers]


@pytest.mark.megatron
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_megatron_accepts_the_places_of_prediction_that_are_searched(
    ranks: int, chunks: int, data: st.DataObject
) -> None:
    """Any stage of the last chunk row, with no layer behind it; no other where there are more rows."""
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    stages = ranks * chunks
    place = data.draw(st.integers(0, stages - 1))
    least, most = layer_limits(3, stages, place, allow_empty=data.draw(st.booleans()))
    layers = [
        data.draw(st.integers(fewest, max(fewest, limit)))
        for fewest, limit in zip(least.tolist(), most.tolist(), strict=True)
    ]
    searched = place >= stages - ranks and (layers <= most).all()
    layout = layouts.PipelineParallelLayerLayout(str(Layout.of(layers, 2, place)), pipeline_model_parallel_size=ranks)
    with nullcontext() if searched else pytest.raises(AssertionError):
        layout.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=2)


@pytest.mark.parametrize("text", ["Et*99999999999|L", "E(t*9999|)*99999L", "E(t|)*" + "9" * 5000 + "L"])
def test_repetition_beyond_any_model_is_an_error_and_not_a_full_memory(text: str) -> None:
    with pytest.raises(BalanceError, match="is too long"):
        parse_layout(text)
