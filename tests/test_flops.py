"""FLOPs of whole models against Megatron's own count, and those of small ones against torch's count of what they run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from flops import model_flops
from models import MODELS

from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

ONE = Topology(pipeline_size=4, num_microbatches=32)

COUNT = """
import argparse, json, sys
from megatron.training.arguments import add_megatron_arguments
from megatron.training.training import num_floating_point_operations
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
defaults = vars(parser.parse_args([]))
def count(model):
    assert not (unknown := {*model} - {*defaults} - {"padded_vocab_size", "quick_geglu"}), unknown
    return num_floating_point_operations(argparse.Namespace(**{**defaults, **model}), 1)
print(json.dumps({name: count(model) for name, model in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def megatron_flops() -> dict[str, float]:
    pytest.importorskip("megatron.training", exc_type=ImportError)
    command = [sys.executable, "-W", "ignore", "-c", COUNT, json.dumps(MODELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def counted_otherwise(name: str) -> dict[str, float]:
    """Forward FLOPs that we count and Megatron does not (or, negative, the other way round), by reason."""
    given = {"q_lora_rank": None, "mtp_num_layers": 0, "window_size": None, **MODELS[name]}
    tokens, hidden = given["seq_length"], given["hidden_size"]
    model = ModelSpec.from_arguments(given)
    moe_layers = sum(kind.moe for kind in model.layers) + given["mtp_num_layers"]
    reasons = {}
    if "num_experts" in given:
        reasons["routers"] = moe_layers * 2 * tokens * hidden * given["num_experts"]
    if "kv_lora_rank" in given:
        layers = given["num_layers"] + given["mtp_num_layers"]
        reasons["norms of latent queries, keys and values as products"] = (
            -layers * 2 * tokens * (given["q_lora_rank"] + given["kv_lora_rank"])
        )
    reasons["norms of prediction depths as products"] = -given["mtp_num_layers"] * 2 * tokens * 3 * hidden
    if given["window_size"]:
        seen, queries = given["window_size"][0] + 1, given["num_attention_heads"] * given["kv_channels"]
        outside = (tokens - seen) ** 2 / 2
        reasons["keys outside of windows"] = -given["num_layers"] // 2 * 4 * outside * queries
    if "quick_geglu" in given:
        expert = 2 * hidden * given["moe_ffn_hidden_size"]
        reasons["gates of --quick-geglu"] = moe_layers * tokens * given["moe_router_topk"] * expert
    if "mamba_num_heads" in given:
        inner = given["mamba_num_heads"] * given["mamba_head_dim"] - 2 * hidden
        mamba_layers = given["hybrid_layer_pattern"].count("M")
        reasons["Mamba channels that are not 2 h"] = (
            mamba_layers * tokens * inner * (6 * hidden + 7 * given["mamba_state_dim"])
        )
    return {reason: flops for reason, flops in reasons.items() if flops}


@pytest.mark.megatron
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_megatron_counts(megatron_flops: dict[str, float], name: str) -> None:
    """Megatron counts a step as three forward passes."""
    ours, theirs = 3 * model_flops(ModelSpec.from_arguments(MODELS[name]), ONE), megatron_flops[name]
    explained = 3 * sum(counted_otherwise(name).values())
    assert ours - explained == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-405b", "llama-2-7b", "qwen2.5-7b", "nemotron-h-8b"])
def test_nothing_is_counted_otherwise_of_plain_models(name: str) -> None:
    assert not counted_otherwise(name)


def test_tensor_parallel_ranks_share_what_they_compute() -> None:
    """But for what Transformer Engine has every rank compute whole, unless sequence parallelism splits the tokens."""
    for name in MODELS:
        whole = model_flops(ModelSpec.from_arguments({**MODELS[name], "sequence_parallel": True}), ONE)
        two = Topology(pipeline_size=4, num_microbatches=32, tensor_size=2)
        split = {**MODELS[name], "tensor_model_parallel_size": 2, "sequence_parallel": True}
        assert 2 * model_flops(ModelSpec.from_arguments(split), two) == pytest.approx(whole, rel=1e-9)
