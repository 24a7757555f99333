"""Costs by kind of element: the file, what it is good for, what is refused, and how a plan counts them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.costs.analytic import analytic_table
from megatron_balance.costs.devices import device_chosen
from megatron_balance.costs.table import (
    CostTable,
    ElementRow,
    LayerRow,
    LengthRow,
    fit_length,
    lengths_to_cost,
    load_costs,
    save_costs,
)
from megatron_balance.errors import BalanceError
from megatron_balance.model import Experts, LayerKind, ModelSpec, Recompute
from megatron_balance.pipeline.plan import make_plan
from megatron_balance.topology import Topology

DENSE, MOE = LayerKind(), LayerKind(moe=True)
MODEL = ModelSpec(
    hidden_size=512,
    ffn_hidden_size=2048,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=64,
    padded_vocab_size=32768,
    seq_length=1024,
    layers=(DENSE, DENSE, MOE, MOE, MOE, MOE),
    experts=Experts(count=8, topk=2, ffn_hidden_size=512, shards=2),
    dtype="bf16",
    matmul_dtype="bf16",
    untied_head=True,
)
TOPOLOGY = Topology(pipeline_size=2, num_microbatches=8, micro_batch_size=2, tensor_size=2)


@pytest.fixture
def table() -> CostTable:
    return analytic_table(MODEL, TOPOLOGY, device_chosen("H100"))


def measured(
    update_s_per_parameter: float, head_s: float = 3.0, parameters: tuple[int, int, int] = (1, 1, 1)
) -> CostTable:
    """A model of equal layers of 1 s forward and 2 s backward; parameters of embedding, layer and head."""
    embedding, layer, head = parameters
    return CostTable(
        kind="measured",
        device="GPU",
        embedding=ElementRow(0.0, 0.0, 0.1, 0.1, embedding),
        layers={
            "dense": LayerRow.of(
                ElementRow(1.0, 2.0, 0.1, 0.1, layer), [LengthRow(512, 0.5, 1.0), LengthRow(1024, 1.0, 2.0)], 2
            )
        },
        head=ElementRow(head_s, 2 * head_s, 0.1, 0.1, head),
        update_s_per_parameter=update_s_per_parameter,
        holds_for={},
        provenance={"torch": "2.9"},
        created_by="test",
    )


def equal_layers(count: int) -> ModelSpec:
    return replace(MODEL, layers=(DENSE,) * count, experts=None)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_costs_file_reads_back(table: CostTable, tmp_path) -> None:
    for each in (table, measured(1e-9)):
        save_costs(tmp_path / "costs.json", each)
        assert load_costs(tmp_path / "costs.json") == each


def test_estimates_from_a_file_plan_as_estimates_do(table: CostTable) -> None:
    assert CostTable.from_json(table.to_json()).chain(MODEL, TOPOLOGY) == table.chain(MODEL, TOPOLOGY)


def test_multi_token_prediction_is_an_element_of_its_own_or_in_the_head(tmp_path) -> None:
    predicting = replace(MODEL, mtp_num_layers=1)
    costs = analytic_table(predicting, TOPOLOGY, device_chosen("H100"))
    save_costs(tmp_path / "costs.json", costs)
    chain = load_costs(tmp_path / "costs.json").chain(predicting, TOPOLOGY)
    assert chain.mtp.total_s == costs.mtp.forward_s + costs.mtp.backward_s > chain.layers[-1].total_s
    assert replace(costs, mtp=None).chain(predicting, TOPOLOGY).mtp.total_s == 0


def _set(*path_and_value) -> Callable[[dict], None]:
    *path, key, value = path_and_value

    def edit(values: dict) -> None:
        for step in path:
            values = values[step]
        values[key] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (_set("head", "forward_s", float("nan")), "NaN is not a number"),
        (_set("head", "forward_s", float("inf")), "Infinity is not a number"),
        (_set("head", "backward_s", -1.0), r"head\.backward_s is -1\.0, not a number of 0 or more"),
        (_set("layers", "moe", "forward_s", 0), r"layers\.moe\.forward_s is 0\.0, not a number above 0"),
        (_set("head", "forward_s", 10**400), r"forward_s is 1000.*, not a number of 0 or more"),
        (_set("layers", "moe", "parameters", 10**400), r"parameters is 1000.*, not a whole number"),
        (_set("layers", "moe", "parameters", 1.5), r"layers\.moe\.parameters is 1\.5, not a whole number"),
        (_set("layers", "moe", "forward_fit", [1.0]), r"forward_fit is \[1\.0\], not a pair"),
        (_set("layers", "dense", "by_length", 0, "seq_length", 9999), "not ascending"),
        (_set("layers", {}), "layers is {}, not a mapping of at least one kind"),
        (_set("layers", "moe", "forward_s", 5e-324), "forward_s is 5e-324, not 0 or 1e-12 to 1e6 seconds"),
        (_set("head", "backward_s", 1e308), r"backward_s is 1e\+308, not 0 or 1e-12 to 1e6 seconds"),
        (_set("update_s_per_parameter", 1e300), r"update_s_per_parameter is 1e\+300, not"),
        (_set("device", "\x1b[31mGPU\n"), "device is .*, not a text on one line"),
        (_set("kind", "guessed"), "kind is 'guessed', not one of analytic, measured, diagnosed"),
        (_set("owner", "me"), "holds the unknown owner"),
        (lambda values: values.pop("embedding"), "lacks embedding"),
        (lambda values: values["head"].pop("parameters"), r"lacks head\.parameters"),
        (_set("format", "megatron-balance plan"), "is not a costs file: its format is 'megatron-balance plan'"),
        (_set("format_version", 1), "has format_version 1, not 2"),
        (lambda values: values.pop("mtp"), "lacks mtp"),
        (_set("mtp", {}), r"lacks mtp\.backward_s"),
    ],
)
def test_a_damaged_costs_file_is_refused(table: CostTable, tmp_path, edit, complaint: str) -> None:
    values = json.loads(table.to_json())
    edit(values)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(values))
    with pytest.raises(BalanceError, match=complaint) as raised:
        load_costs(path)
    assert str(path) in str(raised.value) and "megatron-balance profile" in str(raised.value)


def test_a_file_that_is_cut_off_or_absent_is_refused(table: CostTable, tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(table.to_json()[:-100])
    with pytest.raises(BalanceError, match="is not whole JSON"):
        load_costs(path)
    os.mkfifo(tmp_path / "pipe")
    for no_file in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(BalanceError, match=r"cannot be read \(it is not a regular file"):
            load_costs(no_file)
    with pytest.raises(BalanceError, match=r"cannot be written \(it is not a regular file"):
        save_costs(tmp_path / "pipe", table)
    with pytest.raises(BalanceError, match="cannot be written"):
        save_costs(tmp_path / "nowhere" / "costs.json", table)


# --- what costs are good for ------------------------------------------------------------------------------------------


def test_costs_fit_any_depth_but_no_other_shape(table: CostTable) -> None:
    deeper = replace(MODEL, layers=MODEL.layers * 3)
    table.check_fits(analytic_table(deeper, replace(TOPOLOGY, pipeline_size=4), device_chosen("H100")).holds_for, "it")
    for model, topology, difference in (
        (replace(MODEL, hidden_size=1024), TOPOLOGY, "hidden_size is 1024 here, 512 there"),
        (MODEL, replace(TOPOLOGY, tensor_size=4), "tensor_size is 4 here, 2 there"),
        (MODEL, replace(TOPOLOGY, micro_batch_size=1), "micro_batch_size is 1 here, 2 there"),
    ):
        with pytest.raises(BalanceError, match=difference):
            table.check_fits(analytic_table(model, topology, device_chosen("H100")).holds_for, "it")


def test_the_chain_has_each_layers_own_kind(table: CostTable) -> None:
    chain = table.chain(MODEL, TOPOLOGY)
    dense, moe = (table.layers[name] for name in ("dense", "moe"))
    assert [layer.forward_s for layer in chain.layers] == [dense.forward_s] * 2 + [moe.forward_s] * 4
    assert chain.source == "analytic (H100)"
    with pytest.raises(BalanceError, match=r"of dense layers, but the model has moe ones"):
        measured(0.0).chain(MODEL, TOPOLOGY)


def test_layers_that_are_not_recomputed_are_spared_their_second_forward() -> None:
    """The method block recomputes two layers of each of two stages, four of eight."""
    model = replace(equal_layers(8), recompute=Recompute("full", "block", 2))
    costs = replace(measured(0.0), holds_for={"recompute_granularity": "full"})
    assert costs.chain(model, TOPOLOGY).layers[0].backward_s == pytest.approx(2.0 - 1.0 * 4 / 8)
    everywhere = replace(model, recompute=Recompute("full", "uniform", 1))
    assert costs.chain(everywhere, TOPOLOGY).layers[0].backward_s == 2.0


def test_parameters_are_of_one_rank(table: CostTable) -> None:
    assert table.embedding.parameters == (32768 * 512) // 2
    attention, norms, router = 4 * 512 * 512 // 2 + 3 * 512 // 2 + 512, 4 * 512, 8 * (512 + 1)
    experts = 4 * (512 * 512 * 2 + 512 + 512)
    assert table.layers["moe"].parameters == attention + norms + router + experts


@given(
    a=st.floats(1e-9, 1e-3),
    b=st.floats(0, 1e-6),
    lengths=st.lists(st.integers(1, 10**5), min_size=2, max_size=4, unique=True),
)
def test_a_fit_finds_what_made_the_seconds(a: float, b: float, lengths: list[int]) -> None:
    seconds = [a * s + b * s**2 for s in lengths]
    fitted = fit_length(lengths, seconds)
    assert [fitted[0] * s + fitted[1] * s**2 for s in lengths] == pytest.approx(seconds, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=3))
def test_a_fit_is_never_negative(seconds: list[float]) -> None:
    a, b = fit_length([256, 512, 1024][: len(seconds)], seconds)
    assert a >= 0 and b >= 0 and a + b > 0


def test_lengths_are_those_that_the_parallel_sizes_divide() -> None:
    assert lengths_to_cost(1024, TOPOLOGY) == [256, 512, 1024]
    assert lengths_to_cost(24, replace(TOPOLOGY, tensor_size=4)) == [8, 24]  # 6 and 12, in multiples of 8
    assert lengths_to_cost(3, TOPOLOGY) == [3]


# --- the update -------------------------------------------------------------------------------------------------------


def test_a_step_ends_with_the_longest_update() -> None:
    model, topology = equal_layers(6), replace(TOPOLOGY, num_microbatches=16)
    without = make_plan(measured(0.0, head_s=2.0).chain(model, topology), topology, {})
    counted = make_plan(measured(0.5, head_s=2.0, parameters=(3, 1, 4)).chain(model, topology), topology, {})
    assert counted.layers == without.layers == (4, 2)
    assert [stage.update_s for stage in counted.stages] == [3.5, 3.0]
    assert counted.update_s == 3.5 and counted.step_s == pytest.approx(without.step_s + 3.5)
    assert counted.uniform_step_s == pytest.approx(without.uniform_step_s + 3.5)  # the head's stage: 4 + 3 parameters
    assert counted.bubble == pytest.approx(without.bubble)


def test_a_split_whose_update_loses_more_than_its_pipeline_gains_is_not_chosen() -> None:
    model = equal_layers(6)
    assert make_plan(measured(0.0).chain(model, TOPOLOGY), TOPOLOGY, {}).layers != (3, 3)
    assert make_plan(measured(1e3).chain(model, TOPOLOGY), TOPOLOGY, {}).layers == (3, 3)


def test_costs_of_local_layers_say_with_which_flags_they_fit(table: CostTable) -> None:
    here = {**table.holds_for, "fused_kernels": True, "gradient_accumulation_fusion": True}
    there = replace(table, holds_for={**here, "fused_kernels": False, "gradient_accumulation_fusion": False})
    with pytest.raises(BalanceError, match="add --transformer-impl local --no-gradient-accumulation-fusion"):
        there.check_fits(here, "these costs")
    with pytest.raises(BalanceError, match="measure anew"):
        there.check_fits({**here, "hidden_size": 1}, "these costs")
