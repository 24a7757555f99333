"""Numbers of parameters against those of models that Megatron builds, part by part."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_balance.costs.parameters import chain_parameters
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

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
            "moe_shared_expert_intermediate_size": 80, "moe_shared_expert_gate": True, "position_embedding_type": "rope"},
    "moe-biased": {"num_experts": 4, "moe_ffn_hidden_size": 48, "swiglu": True},
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
              "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
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
    parameters = chain_parameters(model, Topology(pipeline_size=2, num_microbatches=1))
    assert parameters.embedding.total == built[name]["embedding"]
    assert [layer.total for layer in parameters.layers[:-1]] == built[name]["layers"][:-1]
    *_, last = built[name]["layers"]
    assert (parameters.layers[-1] + parameters.mtp + parameters.head).total == last + built[name]["head"]
