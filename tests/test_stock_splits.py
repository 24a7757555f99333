"""Megatron's own splits: the same as Megatron's config accepts and its block builds, and refused where it refuses."""

from __future__ import annotations

import itertools
import warnings

import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.topology import Topology

SHAPES = [
    (8, 4, 1),
    (7, 4, 1),
    (9, 2, 1),
    (10, 4, 1),
    (8, 2, 2),
    (14, 4, 2),
    (15, 4, 2),
    (2, 4, 1),
    (6, 3, 2),
    (7, 1, 1),
]


def built_by_megatron(num_layers: int, ranks: int, chunks: int, **flags) -> tuple[int, ...] | None:
    """Layers of each stage, as Megatron builds them; None where it refuses."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = TransformerConfig(
                num_layers=num_layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=ranks,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                pipeline_dtype=torch.float32,
                **flags,
            )
        places = itertools.product(range(chunks), range(ranks))
        layers = tuple(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank) for chunk, rank in places)
        return layers if min(layers) >= 0 else None  # it lets less than no layer pass
    except (ValueError, AssertionError):
        return None


def ours(find, *args) -> tuple[int, ...] | None:
    try:
        return find(*args)
    except BalanceError:
        return None


@pytest.mark.megatron
@pytest.mark.parametrize(("num_layers", "ranks", "chunks"), SHAPES)
def test_splits_are_those_that_megatron_builds(num_layers: int, ranks: int, chunks: int) -> None:
    topology = Topology(ranks, ranks, chunks)
    for embedding, loss in itertools.product((False, True), repeat=2):
        theirs = built_by_megatron(
            num_layers,
            ranks,
            chunks,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
        )
        assert ours(stock.even_split, num_layers, topology, embedding, loss) == theirs, (embedding, loss)
    for first, last in itertools.product((None, *range(num_layers + 2)), repeat=2):
        if (first, last) == (None, None) or ranks == 1:
            continue
        theirs = built_by_megatron(
            num_layers, ranks, chunks, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
        )
        assert ours(stock.counted_split, num_layers, topology, first, last) == theirs, (first, last)


def test_counts_are_all_legal_and_each_split_once() -> None:
    topology = Topology(4, 8, 2)
    splits = [split for _, _, split in stock.counts(14, topology)]
    assert len(set(splits)) == len(splits) > 3
    pairs = itertools.product((None, *range(1, 15)), repeat=2)
    legal = {
        split for pair in pairs if pair != (None, None) and (split := ours(stock.counted_split, 14, topology, *pair))
    }
    assert set(splits) == legal
    assert list(stock.counts(8, Topology(1, 4))) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Ett|tt|tt|ttL",
            "it has 4 stages, this job 2 stages; plan for --num-virtual-stages-per-pipeline-rank 2 to compare",
        ),
        ("Ett|tt|ttL", "it has 3 stages, this job 2 stages$"),
        ("Ettt|tttL", "it has 6 layers, the model 8"),
        ("Ettt|tttttmL", "it has 1 m, the model 0"),
    ],
)
def test_layout_of_another_job_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BalanceError, match=reason):
        stock.check_layout(parse_layout(text), 8, 0, Topology(2, 8), mtp_last=False)


def test_rank_without_any_layer_is_refused_and_an_empty_stage_is_not() -> None:
    with pytest.raises(BalanceError, match="pipeline rank 1 has no layer"):
        stock.check_layout(parse_layout("Etttt||ttttL"), 8, 0, Topology(3, 8), mtp_last=False)
    stock.check_layout(parse_layout("Ett||tt|tt|tt|L"), 8, 0, Topology(3, 9, 2), mtp_last=False)


def test_place_of_multi_token_prediction() -> None:
    virtual = Topology(2, 8, 2)
    stock.check_layout(parse_layout("Ett|ttt|tttm|L"), 8, 1, virtual, mtp_last=False)
    with pytest.raises(BalanceError, match=r"before 0\.16"):
        stock.check_layout(parse_layout("Ett|ttt|tttm|L"), 8, 1, virtual, mtp_last=True)
    with pytest.raises(BalanceError, match="last virtual stage of its rank"):
        stock.check_layout(parse_layout("Ett|ttttttm||L"), 8, 1, virtual, mtp_last=False)


def test_combined_passes_and_patterns_keep_prediction_with_the_head_and_every_stage_filled() -> None:
    virtual = Topology(2, 8, 2)
    assert stock.mtp_stages(virtual, by_pattern=False) == (3,) and stock.may_leave_empty(virtual, by_pattern=False)
    for topology, by_pattern in ((Topology(2, 8, 2, overlap_moe=True), False), (virtual, True)):
        assert stock.mtp_stages(topology, by_pattern) is None and not stock.may_leave_empty(topology, by_pattern)
