"""The model read from Megatron's argument names, and its parameters against models that Megatron builds."""

from __future__ import annotations

import json
import subprocess
import sys

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


# Parameters of models that Megatron builds on the CPU: whole stages of a GPTModel, by part.
TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "padded_vocab_size": 256,
        "max_position_embeddings": 32}  # fmt: skip
BUILT = {
    "gpt": {},
    "llama": {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "group_query_attention": True,
              "num_query_groups": 2, "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
    "qwen": {"swiglu": True, "add_bias_linear": False, "add_qkv_bias": True, "normalization": "RMSNorm",
             "qk_layernorm": True, "position_embedding_type": "rope", "kv_channels": 32},
    "moe": {"num_experts": 4, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 48, "add_bias_linear": False,
            "moe_shared_expert_intermediate_size": 80, "position_embedding_type": "rope"},
    "mtp": {"mtp_num_layers": 2, "position_embedding_type": "rope", "add_bias_linear": False},
}  # fmt: skip

BUILD = """
import json, sys
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.transformer_config import TransformerConfig

def count(module):
    return sum(parameter.numel() for parameter in module.parameters())

def config(arguments):
    chosen = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "add_bias_linear",
              "add_qkv_bias", "normalization", "qk_layernorm", "mtp_num_layers", "moe_layer_freq",
              "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return TransformerConfig(
        **{name: arguments[name] for name in chosen if name in arguments},
        num_query_groups=arguments.get("num_query_groups"), num_moe_experts=arguments.get("num_experts"),
        gated_linear_unit=arguments.get("swiglu", False), use_cpu_initialization=True, persist_layer_norm=False,
        activation_func=torch.nn.functional.silu if arguments.get("swiglu") else torch.nn.functional.gelu,
    )

def parts(arguments):
    settings = config(arguments)
    if settings.num_moe_experts:
        layers = gpt_layer_specs.get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    else:
        layers = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=settings.qk_layernorm, normalization=settings.normalization)
    mtp = None
    if settings.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(settings, layers, use_transformer_engine=False)
    def stage(**where):
        return GPTModel(
            settings, layers, arguments["padded_vocab_size"], arguments["max_position_embeddings"],
            share_embeddings_and_output_weights=not arguments.get("untie_embeddings_and_output_weights"),
            position_embedding_type=arguments.get("position_embedding_type", "learned_absolute"), **where)
    first, last = stage(post_process=False), stage(pre_process=False, mtp_block_spec=mtp)
    return {"embedding": count(first.embedding), "layers": [count(layer) for layer in first.decoder.layers],
            "head": count(last) - sum(count(layer) for layer in last.decoder.layers)}

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
parallel_state.initialize_model_parallel()
print(json.dumps({name: parts(arguments) for name, arguments in json.loads(sys.argv[2]).items()}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, dict]:
    pytest.importorskip("megatron.core")
    models = {name: {**TINY, **arguments, "ffn_hidden_size": 160} for name, arguments in BUILT.items()}
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(store), json.dumps(models)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.megatron
@pytest.mark.parametrize("name", BUILT)
def test_parameters_are_those_that_megatron_builds(built, name):
    model = ModelSpec.from_arguments({**TINY, **BUILT[name], "ffn_hidden_size": 160})
    assert {
        "embedding": model.embedding_parameters,
        "layers": [model.layer_parameters(index) for index in range(model.num_layers)],
        "head": model.head_parameters,
    } == built[name]
