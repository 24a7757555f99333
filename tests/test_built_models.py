"""Parameters and forward FLOPs of models that Megatron builds on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flops import model_flops
from packaging.version import Version

from megatron_balance.costs.parameters import chain_parameters
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

LLAMA = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4, "seq_length": 32,
    "padded_vocab_size": 256, "max_position_embeddings": 32, "swiglu": True, "add_bias_linear": False,
    "normalization": "RMSNorm", "group_query_attention": True, "num_query_groups": 2, "kv_channels": 32,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "transformer_impl": "local",
}  # fmt: skip
LATENT = {
    "group_query_attention": False, "num_query_groups": 4, "multi_latent_attention": True, "kv_lora_rank": 24,
    "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 20,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1],
           "moe_shared_expert_intermediate_size": 80}  # fmt: skip
BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 8.0}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 2.0}},
    {"attention": {"n_heads_in_group": None, "replace_with_linear": True}, "ffn": {"ffn_mult": None, "no_op": True}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": None, "replace_with_linear": True}},
]
MODELS: dict[str, dict[str, Any]] = {
    "dense": LLAMA,
    "biases": {**LLAMA, "add_bias_linear": True, "swiglu": False, "qk_layernorm": True, "normalization": "LayerNorm"},
    "experts": {**LLAMA, **EXPERTS},
    "latent": {**LLAMA, **LATENT, "q_lora_rank": 40},
    "latent, whole queries": {**LLAMA, **LATENT, "q_lora_rank": None},
    "latent experts that predict": {**LLAMA, **LATENT, **EXPERTS, "q_lora_rank": 40, "mtp_num_layers": 2},
    "blocks": {**LLAMA, "num_layers": 5, "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": BLOCKS})},
}  # fmt: skip
MAMBA = {**LLAMA, "num_layers": 1, "hybrid_layer_pattern": "M", "mamba_num_heads": 6, "mamba_head_dim": 16,
         "mamba_num_groups": 2, "mamba_state_dim": 24}  # fmt: skip
ONE = Topology(pipeline_size=1, num_microbatches=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    pytest.importorskip("megatron.core")
    script, store = Path(__file__).with_name("built_models.py"), tmp_path_factory.mktemp("rendezvous") / "store"
    command = [sys.executable, "-W", "ignore", str(script), str(store), json.dumps({**MODELS, "mamba": MAMBA})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: one for line in done.stdout.splitlines() if line[0] == "{" for name, one in json.loads(line).items()}


def _one(built: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """What was built of model ``name``; older Megatrons build some kinds with Transformer Engine alone."""
    reason = built[name].get("cannot")
    if reason and Version(version("megatron-core")) < Version("0.19"):
        pytest.skip(reason)
    assert not reason
    return built[name]


@pytest.mark.megatron
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_megatron_builds(built: dict[str, dict[str, Any]], name: str) -> None:
    model = ModelSpec.from_arguments(MODELS[name])
    parameters = chain_parameters(model, ONE)
    final_norm = model.hidden_size if model.mtp_num_layers else 0  # counted with the last layer
    layers = [layer.total for layer in parameters.layers]
    one = _one(built, name)
    assert [*layers[:-1], layers[-1] - final_norm] == one["layers"]
    assert parameters.total.total == one["parameters"]


@pytest.mark.megatron
@pytest.mark.parametrize("name", MODELS)
def test_forward_flops_are_those_that_run(built: dict[str, dict[str, Any]], name: str) -> None:
    assert model_flops(ModelSpec.from_arguments(MODELS[name]), ONE) == _one(built, name)["flops"]


@pytest.mark.megatron
def test_parameters_of_a_mamba_mixer_are_those_that_megatron_builds(built: dict[str, dict[str, Any]]) -> None:
    (layer,) = chain_parameters(ModelSpec.from_arguments(MAMBA), ONE).layers
    assert layer.total - MAMBA["hidden_size"] == _one(built, "mamba")["mixer"]
