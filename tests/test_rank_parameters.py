"""Parameters of every rank of real training runs, against those that are counted."""

from __future__ import annotations

import pytest
from launch import TINY, launch, trained
from test_balanced_training import BALANCED, TIED, UNTIED

from megatron_balance.costs.parameters import Parameters, chain_parameters
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

pytestmark = pytest.mark.training

# What the flags of the runs say.
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
         "padded_vocab_size": 128}  # fmt: skip


def differences(run, arguments: dict, topology: Topology) -> list[tuple[int, int, int]]:
    """Stages of all ranks whose parameters are others: stage, built, counted."""
    counted = chain_parameters(ModelSpec.from_arguments({**SIZES, **arguments}), topology)
    found = []
    for rank in run.ranks.values():
        for number, chunk in enumerate(rank["chunks"]):
            stage = number * topology.pipeline_size + rank["pipeline_rank"]
            own = sum((counted.layers[layer - 1] for layer in chunk["layers"]), Parameters())
            if stage == 0:
                own += counted.embedding
            if stage == topology.num_stages - 1:
                own += counted.mtp + counted.head
            if own.total != chunk["parameters"]:
                found.append((stage, chunk["parameters"], own.total))
    return found


@pytest.mark.parametrize(
    ("model", "parallel", "processes", "topology"),
    [
        (
            UNTIED,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
            4,
            Topology(2, 8, tensor_size=2),
        ),
        (UNTIED, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2, Topology(2, 8, 2)),
        (TIED, "--pipeline-model-parallel-size 2", 2, Topology(2, 8)),
        (TIED, "", 1, Topology(1, 8)),
    ],
    ids=["TP2-PP2", "VPP2", "tied", "tied-PP1"],
)
def test_ranks_hold_the_parameters_that_are_counted(from_checkpoint, model, parallel, processes, topology):
    run = from_checkpoint(model, f"{parallel} {BALANCED}" if parallel else "", processes)
    arguments = {
        "num_layers": 8,
        "untie_embeddings_and_output_weights": model == UNTIED,
        "tensor_model_parallel_size": topology.tensor_size,
    }
    assert len(run.ranks) == processes
    assert differences(run, arguments, topology) == []


LLAMA = (
    "--num-layers 4 --train-iters 1 --position-embedding-type rope --swiglu --ffn-hidden-size 96"
    " --disable-bias-linear --normalization RMSNorm --group-query-attention --num-query-groups 2"
    " --pipeline-model-parallel-size 2"
).split()
LLAMA_ARGUMENTS = {
    "num_layers": 4, "position_embedding_type": "rope", "swiglu": True, "ffn_hidden_size": 96, "add_bias_linear": False,
    "normalization": "RMSNorm", "group_query_attention": True, "num_query_groups": 2,
}  # fmt: skip


def test_tensor_parallel_ranks_share_query_groups(tmp_path):
    run = trained(launch(tmp_path, [*TINY, *LLAMA, "--tensor-model-parallel-size", "2", "--add-qkv-bias"], 4))
    arguments = {**LLAMA_ARGUMENTS, "tensor_model_parallel_size": 2, "add_qkv_bias": True}
    assert len(run.ranks) == 4
    assert differences(run, arguments, Topology(2, 8, tensor_size=2)) == []


def test_expert_parallel_ranks_share_experts_and_the_last_predicts_more_tokens(tmp_path):
    flags = (
        "--untie-embeddings-and-output-weights --num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 48"
        " --moe-layer-freq [0,1,1,1] --mtp-num-layers 1"
    ).split()
    run = trained(launch(tmp_path, [*TINY, *LLAMA, *flags], 4))
    arguments = {
        **LLAMA_ARGUMENTS, "untie_embeddings_and_output_weights": True, "num_experts": 4,
        "expert_model_parallel_size": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1, 1, 1], "mtp_num_layers": 1,
    }  # fmt: skip
    assert len(run.ranks) == 4
    assert differences(run, arguments, Topology(2, 4, data_size=2)) == []
