"""The model read from Megatron's argument names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.model import Experts, HybridPattern, LatentAttention, LayerKind, Mamba, ModelSpec, Recompute

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
        ({"experimental_attention_variant": "gated_delta_net"}, "--pipeline-model-parallel-layout"),
        ({"hybrid_layer_pattern": "MG*-"}, "|"),
        ({"hybrid_layer_pattern": "MD"}, "|"),
        ({"is_hybrid_model": True}, "--hybrid-layer-pattern"),
        ({"spec": ["a", "b"]}, "--pipeline-model-parallel-layout"),
    ],
)
def test_models_without_costs_are_refused_with_the_way_round(arguments, remedy):
    with pytest.raises(BalanceError) as error:
        spec(**arguments)
    assert next(iter(arguments)) in str(error.value) and remedy in str(error.value)


def test_latent_attention():
    latent = spec(multi_latent_attention=True, q_lora_rank=96, kv_lora_rank=64, qk_head_dim=24, v_head_dim=40)
    assert latent.latent_attention == LatentAttention(96, 64, 24, 64, 40) and latent.layers == spec().layers
    assert spec(multi_latent_attention=True).latent_attention == LatentAttention(None, 32, 128, 64, 128)
    assert spec(q_lora_rank=96).latent_attention is None
    with pytest.raises(BalanceError, match="attention_output_gate"):
        spec(multi_latent_attention=True, attention_output_gate=True)


def test_names_of_kinds_last():
    """They are keys in costs files."""
    names = {
        LayerKind(): "dense",
        LayerKind(moe=True, window=4096): "moe/4096",
        LayerKind(mixer="mamba", feed_forward=None): "mamba",
        LayerKind(feed_forward=None): "attention",
        LayerKind(feed_forward=None, window=128): "attention/128",
        LayerKind(mixer=None): "mlp",
        LayerKind(mixer=None, moe=True): "experts",
        LayerKind(num_query_groups=8, ffn_hidden_size=14336): "attention:8+mlp:14336",
        LayerKind(mixer="linear", feed_forward="linear"): "linear+linear",
        LayerKind(mixer=None, feed_forward=None): "empty",
    }
    assert [str(kind) for kind in names] == [*names.values()]


def test_layers_of_a_hybrid_model_are_those_of_its_pattern():
    model = spec(hybrid_layer_pattern="M*-|E*/*-/*-", num_experts=4, window_size=(31, 0), num_layers=99)
    assert [str(kind) for kind in model.layers] == ["mamba", "attention/31", "mlp", "experts", "attention/31"]
    assert [str(kind) for kind in model.depth_layers] == ["attention", "mlp"] and model.mtp_num_layers == 2
    assert model.mamba == Mamba(num_heads=8, head_dim=64, state_dim=128, num_groups=8)
    latent = spec(hybrid_layer_pattern="M+")
    assert latent.layers == spec(hybrid_layer_pattern="M*").layers and latent.latent_attention
    older = spec(is_hybrid_model=True, hybrid_override_pattern="M*", mtp_num_layers=2, mtp_hybrid_override_pattern="M")
    assert older.depth_layers == older.layers[:1] and older.mtp_num_layers == 2
    assert spec(hybrid_layer_pattern="M-", spec=["megatron.core.models.hybrid", "stack"]).num_layers == 2


@given(st.text("M*-E", min_size=1, max_size=12), st.data())
def test_a_pattern_splits_into_any_stages_and_reads_back(letters: str, data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(letters)), max_size=4)))
    layers = [end - start for start, end in zip([0, *borders], [*borders, len(letters)], strict=True)]
    split = HybridPattern.parse(f"{letters}/M*/M*").split(layers)
    assert [len(stage) for stage in split.stages] == layers
    assert split == HybridPattern.parse(str(split)) and split.letters == letters and split.mtp_num_layers == 2
    with pytest.raises(BalanceError):
        split.split([*layers, 1])


BLOCKS = [
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 6.0}},
    {"attention": {"n_heads_in_group": 8}, "mlp": {"ffn_hidden_size": 1536}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 3.1}},
    {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
]


def blocks(*edited, **arguments) -> ModelSpec:
    config = json.dumps({"block_configs": list(edited) or BLOCKS})
    given = {"num_layers": len(edited) or 4, "group_query_attention": True, "num_query_groups": 2, **arguments}
    return spec(**given, heterogeneous_layers_config_encoded_json=config)


def test_layers_may_have_a_configuration_each(tmp_path):
    """Widths that are a factor are two thirds of it, rounded up to 256; the model's own are 1024 and 2 groups."""
    kinds = ["dense", "attention:1+mlp:1536", "mlp:768", "linear"]
    assert [str(kind) for kind in blocks().layers] == kinds
    (tmp_path / "config.json").write_text(json.dumps({"block_configs": BLOCKS}))
    groups = {"group_query_attention": True, "num_query_groups": 2}
    read = spec(num_layers=4, heterogeneous_layers_config_path=str(tmp_path / "config.json"), **groups)
    assert read.layers == blocks().layers


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: blocks(num_layers=5), ["num_layers", "5", "4"]),
        (lambda: blocks({"ffn": {}}), ["block_configs[0].attention"]),
        (
            lambda: blocks({"attention": {"n_heads_in_group": 3}, "ffn": {"no_op": True}}),
            ["n_heads_in_group", "3", "8"],
        ),
        (lambda: blocks({"attention": {}, "mlp": {"ffn_hidden_size": 0.5}}), ["block_configs[0]", "0.5"]),
        (lambda: spec(heterogeneous_layers_config_encoded_json="{"), ["JSON"]),
        (lambda: spec(heterogeneous_layers_config_path="nowhere.json"), ["nowhere.json"]),
        (lambda: spec(hybrid_layer_pattern="MX"), ["'X'"]),
        (lambda: spec(hybrid_layer_pattern="/M"), ["no layers"]),
        (lambda: spec(hybrid_layer_pattern="M/M/*"), ["alike"]),
        (lambda: spec(hybrid_layer_pattern="M*+"), ["*", "+"]),
        (lambda: spec(hybrid_layer_pattern="M", mtp_num_layers=1), ["mtp_num_layers", "/"]),
        (lambda: spec(hybrid_layer_pattern="ME"), ["num_experts"]),
        (lambda: spec(hybrid_layer_pattern="M", mamba_head_dim=48), ["mamba_head_dim", "48", "512"]),
        (lambda: spec(hybrid_layer_pattern="M", mamba_num_groups=3), ["mamba_num_groups", "3", "8"]),
        (
            lambda: spec(hybrid_layer_pattern="M", mamba_num_groups=1, tensor_model_parallel_size=2),
            ["mamba_num_groups"],
        ),
    ],
)
def test_layers_that_cannot_be_are_named(make, words):
    with pytest.raises(BalanceError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


def test_fingerprint_is_flat_json_and_tells_models_apart():
    moe = {"num_experts": 8, "moe_layer_freq": [0] * 3 + [1] * 9}
    variants = [{}, {"hidden_size": 512}, {"swiglu": True}, {"recompute_activations": True}, moe, {"num_layers": 13},
                {"multi_latent_attention": True}, {"hybrid_layer_pattern": "M*" * 6}]  # fmt: skip
    prints = [spec(**arguments).fingerprint for arguments in variants]
    assert len({json.dumps(entry, sort_keys=True) for entry in prints}) == len(variants)
    assert all(value is None or isinstance(value, (int, str, float)) for entry in prints for value in entry.values())
    assert prints[4]["layers"] == "3 dense, 9 moe" and prints[4]["experts_count"] == 8
    filled_in = {"ffn_hidden_size": 1024, "kv_channels": 32, "padded_vocab_size": 50304, "add_qkv_bias": True}
    assert spec(**filled_in).fingerprint == prints[0]
