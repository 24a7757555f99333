"""Hugging Face configs of published models: the arguments that they stand for, and the published numbers of parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models import MODELS

from megatron_balance.costs.parameters import chain_parameters
from megatron_balance.errors import BalanceError
from megatron_balance.hugging_face import arguments_from_config
from megatron_balance.model import LayerKind, ModelSpec
from megatron_balance.topology import Topology

ONE = Topology(pipeline_size=1, num_microbatches=1)

# The numbers that decide a model's shape, as its config.json has them.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 152064,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32768,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_local_experts": 128, "sliding_window": 128, "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}  # fmt: skip

PUBLISHED = {
    "llama-3-8b": 8.03e9,
    "qwen2.5-7b": 7.62e9,
    "qwen3-30b-a3b": 30.5e9,
    "gemma-2-9b": 9.24e9,
    "mixtral-8x7b": 46.7e9,
    "mistral-7b-v0.3": 7.25e9,
    "deepseek-v3": 671e9,
    "gpt-oss-120b": 116.8e9,
}


@pytest.fixture
def read(tmp_path):
    def read(config: dict[str, Any] | str) -> dict[str, Any]:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return arguments_from_config(path)

    return read


def model(arguments: dict[str, Any], **flags) -> ModelSpec:
    return ModelSpec.from_arguments({**arguments, "seq_length": 4096, "make_vocab_size_divisible_by": 1, **flags})


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_as_published(read, name):
    spec = model(read(CONFIGS[name]), mtp_num_layers=0)
    total = chain_parameters(spec, ONE).total.total
    assert total == pytest.approx(PUBLISHED[name], rel=1e-3 if PUBLISHED[name] < 20e9 else 2.5e-3)


def test_prediction_depth_of_deepseek_v3_is_as_published(read):
    """14 billion beside the 671, of which the published files hold copies of embedding and output layer."""
    arguments = read(CONFIGS["deepseek-v3"])
    assert arguments["mtp_num_layers"] == 1
    with_depth, without = model(arguments), model(arguments, mtp_num_layers=0)
    depth = chain_parameters(with_depth, ONE).total.total - chain_parameters(without, ONE).total.total
    assert depth + 2 * 129280 * 7168 == pytest.approx(14e9, rel=0.05)


@pytest.mark.parametrize("name", sorted({*CONFIGS} & {*MODELS}))
def test_model_is_that_of_the_flags_that_people_train_it_with(read, name):
    flags = MODELS[name]
    shared = {"seq_length": flags["seq_length"], "padded_vocab_size": flags["padded_vocab_size"]}
    shared |= {"max_position_embeddings": 0, "bf16": True}
    from_config = ModelSpec.from_arguments({**read(CONFIGS[name]), **shared})
    assert from_config.fingerprint == ModelSpec.from_arguments({**flags, **shared}).fingerprint


def test_windows_count_earlier_keys(read):
    """Hugging Face's window has the query's own token in it, Megatron's has not."""
    gemma = model(read(CONFIGS["gemma-2-9b"]))
    assert gemma.layers[:3] == (LayerKind(window=4095), LayerKind(), LayerKind(window=4095))
    oss = model(read(CONFIGS["gpt-oss-120b"]))
    assert [kind.window for kind in oss.layers[:4]] == [127, None, 127, None]
    mistral = model(read({**CONFIGS["mistral-7b-v0.3"], "sliding_window": 4096}))
    assert {*mistral.layers} == {LayerKind(window=4095)}


def test_windows_of_qwen_begin_at_a_layer(read):
    qwen = {**CONFIGS["qwen2.5-7b"], "max_window_layers": 20, "sliding_window": 4096}
    assert {*model(read(qwen)).layers} == {LayerKind()}
    layers = model(read({**qwen, "use_sliding_window": True})).layers
    assert layers == (LayerKind(),) * 20 + (LayerKind(window=4095),) * 8


def test_layers_with_experts(read):
    deepseek = model(read(CONFIGS["deepseek-v3"]))
    assert [kind.moe for kind in deepseek.layers] == [False] * 3 + [True] * 58
    qwen = model(read({**CONFIGS["qwen3-30b-a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [1]}))
    assert [kind.moe for kind in qwen.layers[:6]] == [False, False, False, True, False, True]


def test_precision_is_taken_where_the_config_names_bfloat16(read):
    assert read(CONFIGS["llama-3-8b"])["bf16"] and "bf16" not in read(CONFIGS["gemma-2-9b"])


LLAMA = CONFIGS["llama-3-8b"]


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "model_type": "rwkv"}, r"model_type 'rwkv': only deepseek_v2, deepseek_v3, gemma, .*qwen3_moe are known"),
        ({**LLAMA, "model_type": ["llama"]}, r"model_type \['llama'\]"),
        ({}, "model_type None"),
        ({"model_type": "llama", "hidden_size": 8},
         "lacks vocab_size, num_hidden_layers, num_attention_heads, intermediate_size, which a llama model needs"),
        ({**LLAMA, "num_key_value_heads": 5}, "num_attention_heads 32, which num_key_value_heads 5 does not divide"),
        ({**LLAMA, "hidden_size": 4100}, "hidden_size 4100, which num_attention_heads 32 does not divide"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers 0, which must be a whole number from 1"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({**LLAMA, "hidden_size": -4096}, "hidden_size -4096"),
        ({**LLAMA, "hidden_size": 4096.0}, "hidden_size 4096.0, which must be a whole number"),
        ({**LLAMA, "hidden_size": True}, "hidden_size True"),
        ({**LLAMA, "vocab_size": "128256"}, "vocab_size '128256'"),
        ({**LLAMA, "vocab_size": 10**300}, r"vocab_size 10{30,36}\.\.\."),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes', which must be true or false"),
        ({**CONFIGS["gpt-oss-120b"], "layer_types": ["full_attention"]}, "layer_types that is not a list of 36 entries"),
        ({**CONFIGS["gpt-oss-120b"], "layer_types": [1] * 36}, "layer_types 1: only sliding_attention, full_attention"),
        ({**CONFIGS["mixtral-8x7b"], "num_experts_per_tok": 9}, "num_experts_per_tok 9, more than num_local_experts 8"),
        ({**CONFIGS["qwen3-30b-a3b"], "mlp_only_layers": 3}, "mlp_only_layers 3, which must be a list"),
        ("[]", "is not a JSON object"),
        ("{", "is not whole JSON"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN is not a number"),
        ("[" * 100_000, "is not whole JSON"),
    ],
)  # fmt: skip
def test_unusable_configs_are_refused(read, config, message):
    with pytest.raises(BalanceError, match=message) as refusal:
        read(config)
    assert "\n" not in str(refusal.value)


def test_missing_file_is_said(tmp_path):
    with pytest.raises(BalanceError, match=r"config absent\.json cannot be read \(No such file"):
        arguments_from_config("absent.json")
