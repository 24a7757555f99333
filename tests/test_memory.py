"""Memory of pipeline ranks: micro-batches in flight, peaks, and bytes against those that Megatron's layers keep."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.costs.devices import device_chosen, device_named
from megatron_balance.costs.memory import ChainMemory, ElementMemory, Optimizer, chain_memory
from megatron_balance.costs.parameters import chain_parameters
from megatron_balance.errors import BalanceError
from megatron_balance.model import ModelSpec
from megatron_balance.pipeline.memory import device_limit_bytes, limit_like, rank_peaks
from megatron_balance.schedule.in_flight import in_flight
from megatron_balance.schedule.order import schedule_order
from megatron_balance.topology import Topology

# --- micro-batches in flight


@st.composite
def topologies(draw) -> Topology:
    """Any that Megatron's schedules run, up to four ranks and three chunks."""
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if ranks == 1 or chunks == 1:
        return Topology(ranks, draw(st.integers(1, 9)))
    group = draw(st.integers(ranks, 6))
    rest = draw(st.sampled_from([0, *range(ranks, group)]))
    return Topology(ranks, group * draw(st.integers(1, 3)) + rest, chunks, microbatch_group_size=group)


def walked(topology: Topology, rank: int) -> set[tuple[int, ...]]:
    """The Pareto-maximal numbers in flight, by keeping and dropping micro-batches one operation after the other."""
    order = schedule_order(topology)
    alive, moments = set(), set()
    columns = (order.is_backward[rank], order.chunk[rank], order.microbatch[rank])
    for is_backward, chunk, microbatch in zip(*columns, strict=True):
        alive.add((chunk, microbatch))
        moments.add(tuple(sum(own == chunk for own, _ in alive) for chunk in range(topology.virtual_size)))
        if is_backward:
            alive.remove((chunk, microbatch))
    assert not alive

    def is_below(one, other):
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return {moment for moment in moments if not any(is_below(moment, other) for other in moments)}


@given(topologies())
def test_micro_batches_in_flight_are_those_of_a_walk_over_the_order(topology):
    for rank, moments in enumerate(in_flight(topology)):
        assert {tuple(map(int, moment)) for moment in moments} == walked(topology, rank)
        assert len(moments) == len(walked(topology, rank))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (4, 2), (4, 16)])
def test_one_forward_one_backward_holds_a_micro_batch_for_each_later_rank_and_its_own(ranks, microbatches):
    held = [moments.tolist() for moments in in_flight(Topology(ranks, microbatches))]
    assert held == [[[min(ranks - rank, microbatches)]] for rank in range(ranks)]


# --- peaks


def some_chain(num_layers: int) -> ChainMemory:
    layers = tuple(ElementMemory(10, 100 + index, 1000 * (index == 2)) for index in range(num_layers))
    return ChainMemory(ElementMemory(7, 3), layers, ElementMemory(20, 40, 500), ElementMemory(70, 30, 600))


def test_peaks_are_states_activations_in_flight_and_the_largest_working_bytes():
    chain = some_chain(5)
    peaks = rank_peaks(chain, Topology(2, 8), (3, 2))
    assert peaks.tolist() == [7 + 30 + 2 * (3 + 100 + 101 + 102) + 1000, 20 + 20 + 70 + 103 + 104 + 40 + 30 + 600]
    moved = rank_peaks(chain, Topology(2, 8), (3, 2), mtp_stage=0)
    assert (moved - peaks).tolist() == [20 + 2 * 40, -20 - 40]


@given(topologies(), st.integers(0, 2**32 - 1))
def test_peaks_are_those_of_the_worst_moment_of_a_walk(topology, seed):
    draw = np.random.default_rng(seed)
    layers = draw.integers(0, 4, topology.num_stages)
    layers[0] += 1
    mtp_stage = int(draw.integers(topology.num_stages))
    peaks = rank_peaks(some_chain(layers.sum()), topology, layers, mtp_stage)
    ends = {0: [some_chain(1).embedding]}
    ends.setdefault(mtp_stage, []).append(some_chain(1).mtp)
    ends.setdefault(topology.num_stages - 1, []).append(some_chain(1).head)
    every = iter(some_chain(layers.sum()).layers)
    stages = [[*itertools.islice(every, count), *ends.get(stage, [])] for stage, count in enumerate(layers)]
    for rank in range(topology.pipeline_size):
        own = stages[rank :: topology.pipeline_size]
        held = [sum(element.activation_bytes for element in stage) for stage in own]
        worst = max(sum(a * b for a, b in zip(moment, held, strict=True)) for moment in walked(topology, rank))
        states = sum(element.state_bytes for stage in own for element in stage)
        working = max((element.working_bytes for stage in own for element in stage), default=0)
        assert peaks[rank] == states + worst + working


def test_a_known_layout_sets_the_limit():
    chain = some_chain(5)
    assert limit_like(chain, Topology(2, 8), (3, 2)).limit_bytes == rank_peaks(chain, Topology(2, 8), (3, 2)).max()


@pytest.mark.parametrize(("layers", "mtp_stage"), [((3, 3), None), ((5,), None), ((6, -1), None), ((3, 2), 2)])
def test_splits_of_another_chain_are_refused(layers, mtp_stage):
    with pytest.raises(BalanceError, match="stage"):
        rank_peaks(some_chain(5), Topology(2, 8), layers, mtp_stage)


def test_devices_leave_a_reserve_and_the_cpu_knows_no_limit():
    assert device_limit_bytes(device_chosen("H100")) == pytest.approx(70e9)
    assert device_limit_bytes(device_named("NVIDIA A100-PCIE-40GB")) == pytest.approx(34e9)
    assert device_limit_bytes(device_named("NVIDIA GH200 480GB")) == device_limit_bytes(device_chosen("H100"))
    assert device_limit_bytes(device_chosen("cpu")) is None


# --- states

BF16 = {"bf16": True}
SHARDED = {**BF16, "use_distributed_optimizer": True}
AWARE = {**SHARDED, "use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("arguments", "per_parameter", "sharded"),
    [
        ({}, 8, False),
        (BF16, 12, False),
        ({**BF16, "optimizer": "sgd"}, 8, False),
        ({**BF16, "optimizer": "sgd", "sgd_momentum": 0.0}, 4, False),
        (SHARDED, 12, True),
        ({**SHARDED, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}, 3, True),
        (AWARE, 10, True),
        (
            {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "torch.bfloat16", "main_params_dtype": "fp16"},
            6,
            True,
        ),
        ({**SHARDED, "exp_avg_dtype": "bf16"}, 12, True),  # without effect where precision is not watched
    ],
)
def test_optimizers_keep_main_parameters_and_moments(arguments, per_parameter, sharded):
    assert Optimizer.from_arguments(arguments) == Optimizer(per_parameter, sharded)


def test_unknown_widths_are_named():
    with pytest.raises(BalanceError, match="exp_avg_dtype is int3"):
        Optimizer.from_arguments({**AWARE, "exp_avg_dtype": "int3"})


def test_states_are_megatrons_bytes_for_a_parameter():
    """Its table for bf16 with fp32 gradients: 18, or 6 + 12 / d with a distributed optimizer."""
    arguments = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "padded_vocab_size": 256,
        "num_experts": 8, "expert_model_parallel_size": 4, "moe_layer_freq": [0, 1], **BF16,
    }  # fmt: skip
    model = ModelSpec.from_arguments(arguments)
    topology = Topology(2, 8, data_size=4, context_size=2)
    parameters = chain_parameters(model, topology)
    whole = chain_memory(model, topology, Optimizer.from_arguments(BF16))
    assert whole.layers[1].state_bytes == 18 * parameters.layers[1].total
    assert whole.embedding.state_bytes == 18 * parameters.embedding.total
    spread = chain_memory(model, topology, Optimizer.from_arguments(SHARDED))
    dense, expert = parameters.layers[1].dense, parameters.layers[1].expert
    assert spread.layers[1].state_bytes == (6 + 12 / 8) * dense + (6 + 12 / 2) * expert
    assert spread.head.state_bytes == (6 + 12 / 8) * parameters.head.total


def test_parameters_that_are_gathered_in_low_precision_are_there_in_nothing_else():
    """In fp8 one copy for the forward pass and a transposed one; else beside the parameters in 16 bits. Gradients in fp32."""
    arguments = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "padded_vocab_size": 256,
        **SHARDED, "fp8": "hybrid",
    }  # fmt: skip
    model, topology = ModelSpec.from_arguments(arguments), Topology(2, 8, data_size=4)
    parameters = chain_parameters(model, topology).layers[0].total
    for gathers, width in ((False, 2 + 2 + 4 + 12 / 4), (True, 2 + 4 + 12 / 4)):
        optimizer = Optimizer.from_arguments({**arguments, "fp8_param_gather": gathers})
        chain = chain_memory(model, topology, optimizer)
        assert chain.layers[0].state_bytes == width * parameters
        assert chain.head.state_bytes == chain_memory(model, topology, Optimizer(12, True)).head.state_bytes


# --- activations of Transformer Engine's layers, by hand


def test_flash_attention_keeps_no_scores():
    """A Llama-3-8B layer in bf16, TP 2 with sequence parallelism; widths in values a token of one rank."""
    arguments = {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "group_query_attention": True,
        "num_query_groups": 8, "ffn_hidden_size": 14336, "seq_length": 8192, "padded_vocab_size": 128256, "bf16": True,
        "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tensor_model_parallel_size": 2, "sequence_parallel": True,
    }  # fmt: skip
    chain = chain_memory(ModelSpec.from_arguments(arguments), Topology(4, 16, tensor_size=2), Optimizer(12))
    norms = 2 * (4096 + 4096) / 2
    attention = (4096 + 2 * 1024 + 4096) / 2
    mlp = (2 * 14336 + 14336) / 2
    statistics = 4 * (2 / 2 + 32 / 2)
    assert chain.layers[0].activation_bytes == 8192 * (2 * (norms + attention + mlp) + statistics)
    masked = chain_memory(ModelSpec.from_arguments({**arguments, "hidden_dropout": 0.1}), Topology(4, 16, tensor_size=2),
                          Optimizer(12))  # fmt: skip
    assert masked.layers[0].activation_bytes - chain.layers[0].activation_bytes == 8192 * 2 * 4096 / 2
    spread = chain_memory(ModelSpec.from_arguments({**arguments, "context_parallel_size": 2}),
                          Topology(4, 16, tensor_size=2, context_size=2), Optimizer(12))  # fmt: skip
    assert spread.layers[0].activation_bytes == chain.layers[0].activation_bytes / 2


# --- activations against those that Megatron's layers keep

SMALL = {
    "num_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 96, "max_position_embeddings": 96,
    "padded_vocab_size": 512, "ffn_hidden_size": 320, "micro_batch_size": 2, "transformer_impl": "local",
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA = {
    "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "group_query_attention": True,
    "num_query_groups": 2, "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MOE = {
    "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "num_experts": 4, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96, "moe_layer_freq": [0, 1, 1],
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
KEPT = {
    "gpt": {},
    "gpt-bf16": {"bf16": True},
    "gpt-rope": {"position_embedding_type": "rope"},
    "llama": LLAMA,
    "llama-bf16": {**LLAMA, "bf16": True},
    "qwen-bf16": {**LLAMA, "qk_layernorm": True, "bf16": True},
    "qk-layernorm": {"qk_layernorm": True, "group_query_attention": True, "num_query_groups": 2},
    "moe": MOE,
    "moe-bf16": {**MOE, "bf16": True, "moe_shared_expert_intermediate_size": 160},
    "moe-ungated": {**MOE, "swiglu": False},
    "mtp": {"mtp_num_layers": 2, "position_embedding_type": "rope"},
    "full": {**LLAMA, **FULL, "bf16": True},
    "full-mtp": {**FULL, "mtp_num_layers": 1, "position_embedding_type": "rope"},
    "block": {**FULL, "recompute_method": "block"},
    "block-mtp": {**FULL, "recompute_method": "block", "mtp_num_layers": 1, "position_embedding_type": "rope"},
    "core": SELECTIVE,
    "core-llama-bf16": {**LLAMA, **SELECTIVE, "bf16": True},
    "mlp": {**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]},
    "moe-again": {**MOE, **SELECTIVE, "recompute_modules": ["moe"]},
    "shared-again": {**MOE, **SELECTIVE, "recompute_modules": ["shared_experts"],
                     "moe_shared_expert_intermediate_size": 160},
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> dict[str, dict[str, int] | str]:
    """Bytes that the elements of models built by Megatron keep, or what is missing here to run them."""
    pytest.importorskip("megatron.core")
    models = {name: {**SMALL, **arguments} for name, arguments in KEPT.items()}
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    driver = Path(__file__).with_name("kept_tensors.py")
    command = [sys.executable, "-W", "ignore", str(driver), str(store), json.dumps(models)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.megatron
@pytest.mark.parametrize("name", KEPT)
def test_activations_are_those_that_layers_keep(kept, name):
    arguments = {**SMALL, **KEPT[name]}
    topology = Topology(1, 1, micro_batch_size=arguments["micro_batch_size"])
    chain = chain_memory(ModelSpec.from_arguments(arguments), topology, Optimizer(8))
    seen = kept[name]
    if seen == "name 'te_general_gemm' is not defined":
        pytest.skip("this Megatron routes tokens with Transformer Engine alone")
    layers = [seen[f"layer {index}"] for index in range(3)]
    expected = [layer.activation_bytes for layer in chain.layers]
    if not name.startswith(
        "block"
    ):  # which layers are computed again depends on the split: there each carries its share
        assert expected[1:] == pytest.approx(layers[1:], rel=0.1)
    assert sum(expected) == pytest.approx(sum(layers), rel=0.1)  # the first brings mask and rotary tables for all
    head = seen["head"] + seen.get("outputs", 0)
    assert chain.head.activation_bytes == pytest.approx(head, rel=0.1)
    assert chain.mtp.activation_bytes == pytest.approx(seen.get("mtp", 0), rel=0.1)
    assert chain.embedding.activation_bytes == seen["embedding"]
