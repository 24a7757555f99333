"""What sequences cost: against the costs that a plan of the pipeline stands on, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from models import MODELS

from megatron_balance.costs.analytic import analytic_table
from megatron_balance.costs.devices import device_chosen
from megatron_balance.model import ModelSpec
from megatron_balance.packing.cost import VARIABLE, BinCost, SequenceCost
from megatron_balance.topology import Topology

DEVICE = device_chosen("H100")
LONG = 65536


def model_of(name: str, **changes) -> ModelSpec:
    return replace(ModelSpec.from_arguments(MODELS[name]), **{"seq_length": LONG, **changes})


def cost_s(cost: SequenceCost, tokens: int) -> np.ndarray:
    return (cost.linear_s(np.array([tokens])) + cost.attention_s(np.array([tokens])))[:, 0]


@pytest.mark.parametrize("device", [DEVICE, None], ids=["counted", "fitted"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "nemotron-h-8b", "deepseek-v3"])
def test_a_sequence_costs_what_the_chain_costs_at_several_lengths(name: str, device) -> None:
    """Windows of 4096 in every second layer, one layer in six with attention, latent attention and prediction depths."""
    model = model_of(name)
    if model.experts is not None:  # their weights are read for few tokens as for many: no part of a packed sequence
        model = replace(model, experts=replace(model.experts, count=8, topk=8))
    topology = Topology(4, 8, micro_batch_size=2, tensor_size=2)
    cost = SequenceCost.of_table(analytic_table(model, topology, DEVICE), model, topology, device)
    for length, tolerance in ((LONG, 1e-9), (LONG // 2, 0.02), (LONG // 4, 0.02), (LONG // 8, 0.04)):
        shorter = replace(model, seq_length=length)
        total = analytic_table(shorter, topology, DEVICE).chain(shorter, topology).total
        wanted = np.array([total.forward_s, total.backward_s]) / topology.micro_batch_size
        assert cost_s(cost, length) == pytest.approx(wanted, rel=tolerance), length


def test_both_ways_to_attention_agree_and_parallel_sizes_divide_it() -> None:
    model = model_of("llama-3-8b")
    pairs = {}
    for tensor, context in ((1, 1), (2, 1), (1, 2)):
        topology = Topology(4, 8, tensor_size=tensor, context_size=context)
        table = analytic_table(model, topology, DEVICE)
        ((_, *counted),) = SequenceCost.of_table(table, model, topology, DEVICE).quadratic
        ((_, *fitted),) = SequenceCost.of_table(table, model, topology).quadratic
        assert fitted == pytest.approx(counted, rel=1e-6)
        pairs[tensor, context] = np.array(counted)
    flops = 32 * 2 * 2 * 4096 / 2  # layers, products, multiply and add, heads; half of the square
    rate = DEVICE.matmul_flops_per_s["bf16"]
    assert pairs[1, 1] == pytest.approx(np.array([1.0, 2.5]) * flops / rate)
    for halved in ((2, 1), (1, 2)):
        assert pairs[halved] == pytest.approx(pairs[1, 1] / 2)


def test_windows_are_kept_apart_and_the_own_key_counts() -> None:
    model = model_of("gemma-2-9b")
    topology = Topology(1, 1)
    cost = SequenceCost.of_table(analytic_table(model, topology, DEVICE), model, topology)
    (narrow, *narrow_s), (wide, *wide_s) = cost.quadratic
    assert (narrow, wide) == (4096, None)
    assert narrow_s == pytest.approx(wide_s, rel=1e-3)  # all lengths are beyond the window: taken from the full layers
    only = replace(cost, linear=(0.0, 0.0), quadratic=((3, 1.0, 2.0),))
    looked_at = sum(min(query + 1, 3) for query in range(8))  # query 0 sees itself, the others two keys more at most
    triangle = 2 * looked_at - (2 * 3 - 3)  # the area counts half of the diagonal in the first three rows
    assert only.attention_s(np.array([8])) == pytest.approx(np.array([[triangle], [2 * triangle]]))


def test_full_recomputation_adds_the_forward_pass_of_attention_to_the_backward_one() -> None:
    arguments = {**MODELS["llama-3-8b"], "seq_length": LONG, "recompute_granularity": "full"}
    topology = Topology(4, 8)
    for method, layers, share in (("uniform", 1, 1.0), ("block", 4, 0.5)):
        model = ModelSpec.from_arguments({**arguments, "recompute_method": method, "recompute_num_layers": layers})
        table = analytic_table(model, topology, DEVICE)
        for device in (DEVICE, None):
            ((_, forward_s, backward_s),) = SequenceCost.of_table(table, model, topology, device).quadratic
            assert backward_s == pytest.approx((2.5 + share) * forward_s, rel=1e-5)


def test_costs_that_are_noise_never_make_the_rest_negative() -> None:
    model, topology = model_of("llama-3-8b"), Topology(1, 1)
    table = analytic_table(model, topology, DEVICE)
    row = table.layers["dense"]
    short, middle, own = row.by_length
    noisy = (short, middle, replace(own, forward_s=50 * own.forward_s))
    table = replace(table, layers={"dense": replace(row, by_length=noisy)})
    cost = SequenceCost.of_table(table, model, topology)
    assert min(cost.linear) >= 0
    total = table.chain(model, topology).total
    assert cost_s(cost, LONG) == pytest.approx([total.forward_s, total.backward_s])


def test_a_bin_of_fixed_shape_pays_for_its_padding_and_one_of_true_length_does_not() -> None:
    sequence, tokens = SequenceCost.of_ratio(5.0), np.array([3, 4])
    fixed, variable = BinCost(sequence, 10), BinCost(sequence, 10, VARIABLE)
    assert fixed.empty_s + fixed.piece_s(tokens).sum(axis=1) == pytest.approx(np.array([1, 2]) * (50 + 9 + 16) / 3)
    assert variable.empty_s + variable.piece_s(tokens).sum(axis=1) == pytest.approx(
        np.array([1, 2]) * (35 + 9 + 16) / 3
    )
