"""The model read from Megatron's argument names."""

from __future__ import annotations

import json

import pytest

from megatron_balance.errors import BalanceError
from megatron_balance.model import Experts, LayerKind, ModelSpec, Recompute

GPT = {"num_layers": 12, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 128, "vocab_size": 50257}


def spec(**arguments) -> ModelSpec:
    return ModelSpec.from_arguments({**GPT, **arguments})


def test_defaults_are_megatrons():
    model = spec()
    assert model.layers == (LayerKind(),) * 12
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (1024, 32, 8)
    assert (model.padded_vocab_size, model.dtype, model.main_gradient_bytes) == (50304, "fp32", 4)
    assert model.fused_kernels and model.gradient_accumulation_fusion and not model.untied_head
    assert model.position_embedding_type == "learned_absolute" and model.recompute == Recompute()


def test_values_present_win_over_rules():
    model = spec(ffn_hidden_size=704, kv_channels=64, padded_vocab_size=50432, position_embedding_type="rope")
    assert (model.ffn_hidden_size, model.kv_channels, model.padded_vocab_size) == (704, 64, 50432)
    assert model.position_embedding_type == "rope"


@pytest.mark.parametrize(
    "arguments, padded",
    [
        ({"tensor_model_parallel_size": 8}, 51200),
        ({"make_vocab_size_divisible_by": 1}, 50257),
        ({"pad_vocab_size": False}, 50257),
        ({"vocab_size": 65536}, 65536),
    ],
)
def test_vocabulary_is_padded_as_megatron_pads_it(arguments, padded):
    assert spec(**arguments).padded_vocab_size == padded


def test_swiglu_width_is_two_thirds_rounded_down_to_64():
    model = spec(swiglu=True, hidden_size=4096)
    assert model.gated and model.ffn_hidden_size == 10880


def test_query_groups_count_only_with_group_query_attention():
    assert spec(num_query_groups=2).num_query_groups == 8
    assert spec(num_query_groups=2, group_query_attention=True).num_query_groups == 2


@pytest.mark.parametrize(
    "arguments, dtype, main_bytes",
    [
        ({"bf16": True}, "bf16", 4),
        ({"bf16": True, "grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False}, "bf16", 2),
        ({"fp16": True}, "fp16", 2),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "fp16", 4),
    ],
)
def test_precision(arguments, dtype, main_bytes):
    model = spec(**arguments)
    assert (model.dtype, model.main_gradient_bytes) == (dtype, main_bytes)
    assert spec(**arguments, fp8="hybrid").matmul_dtype == "fp8"


def test_recompute():
    assert spec(recompute_activations=True).recompute == Recompute("selective", modules=("core_attn",))
    full = spec(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert full.recompute == Recompute("full", "block", 2)


def test_experts_follow_the_frequency():
    model = spec(num_layers=4, num_experts=8, moe_layer_freq=[0, 1, 1, 1], moe_router_topk=4, moe_ffn_hidden_size=64)
    assert [kind.moe for kind in model.layers] == [False, True, True, True]
    assert model.experts == Experts(count=8, topk=4, ffn_hidden_size=64)
    assert [kind.moe for kind in spec(num_layers=4, num_experts=8, moe_layer_freq=2).layers] == [True, False] * 2
    assert not any(kind.moe for kind in spec(moe_layer_freq=1).layers)


def test_windows_follow_the_frequency():
    windowed = spec(num_layers=4, window_size=(31, 0), window_attn_skip_freq=2)
    assert [kind.window for kind in windowed.layers] == [31, None, 31, None]
    assert [kind.window for kind in spec(num_layers=2, window_size=(31, 0)).layers] == [31, 31]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"hidden_size": 250}, ["hidden_size", "250", "num_attention_heads", "8"]),
        ({"num_query_groups": 3, "group_query_attention": True}, ["num_query_groups", "3", "8"]),
        ({"tensor_model_parallel_size": 3}, ["num_attention_heads", "8", "tensor_model_parallel_size", "3"]),
        ({"tensor_model_parallel_size": 2, "padded_vocab_size": 50257}, ["padded_vocab_size", "50257", "2"]),
        ({"context_parallel_size": 3}, ["seq_length", "128", "6"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"num_layers": None}, ["num_layers", "--num-layers"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"padded_vocab_size": 0}, ["padded_vocab_size", "0"]),
        ({"vocab_size": None}, ["vocab_size", "--vocab-size"]),
        ({"hidden_size": "256"}, ["hidden_size", "'256'"]),
        ({"num_attention_heads": -1}, ["num_attention_heads", "-1"]),
        ({"num_experts": 4, "moe_layer_freq": [1, 0]}, ["moe_layer_freq", "12", "[1, 0]"]),
        ({"num_experts": 4, "moe_layer_freq": 0}, ["moe_layer_freq", "0"]),
    ],
)
def test_sizes_that_cannot_be_are_named_with_their_numbers(arguments, words):
    with pytest.raises(BalanceError) as error:
        spec(**arguments)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "arguments, remedy",
    [
        ({"multi_latent_attention": True}, "--pipeline-model-parallel-layout"),
        ({"heterogeneous_layers_config_path": "layers.json"}, "--pipeline-model-parallel-layout"),
        ({"experimental_attention_variant": "gated_delta_net"}, "--pipeline-model-parallel-layout"),
        ({"hybrid_layer_pattern": "M*M*"}, "--hybrid-layer-pattern"),
        ({"spec": ["a", "b"]}, "--pipeline-model-parallel-layout"),
    ],
)
def test_models_without_costs_are_refused_with_the_way_round(arguments, remedy):
    with pytest.raises(BalanceError) as error:
        spec(**arguments)
    assert next(iter(arguments)) in str(error.value) and remedy in str(error.value)


def test_fingerprint_is_flat_json_and_tells_models_apart():
    moe = {"num_experts": 8, "moe_layer_freq": [0] * 3 + [1] * 9}
    variants = [{}, {"hidden_size": 512}, {"swiglu": True}, {"recompute_activations": True}, moe, {"num_layers": 13}]
    prints = [spec(**arguments).fingerprint for arguments in variants]
    assert len({json.dumps(entry, sort_keys=True) for entry in prints}) == len(variants)
    assert all(value is None or isinstance(value, (int, str, float)) for entry in prints for value in entry.values())
    assert prints[4]["layers"] == "3 dense, 9 moe" and prints[4]["experts_count"] == 8
    filled_in = {"ffn_hidden_size": 1024, "kv_channels": 32, "padded_vocab_size": 50304, "add_qkv_bias": True}
    assert spec(**filled_in).fingerprint == prints[0]
