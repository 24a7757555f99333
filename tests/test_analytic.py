"""Analytic costs: what weighs how much, how they scale, and the CPU entry against measured modules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from flops import head_flops, layer_flops
from models import MODELS as PUBLISHED

from megatron_balance.costs.analytic import analytic_table
from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.devices import CPU_CORE, Device, Kernel, device_chosen, device_named
from megatron_balance.errors import BalanceError
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

MODELS = {
    **PUBLISHED,
    "moe-and-mtp": {"num_layers": 12, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16,
                    "padded_vocab_size": 129280, "seq_length": 4096, "num_experts": 64, "moe_router_topk": 6,
                    "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816, "bf16": True,
                    "moe_layer_freq": [0] + [1] * 11, "mtp_num_layers": 1, "position_embedding_type": "rope",
                    "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"},
}  # fmt: skip
ONE = Topology(pipeline_size=4, num_microbatches=32)
H100 = device_named("NVIDIA H100 80GB HBM3")


def spec(name: str = "llama-3-8b", **changes) -> ModelSpec:
    return ModelSpec.from_arguments({**MODELS[name], **changes})


def costs(name: str = "llama-3-8b", topology: Topology = ONE, device: Device = H100, **changes):
    return chain_of(spec(name, **changes), topology, device)


def chain_of(model: ModelSpec, topology: Topology, device: Device) -> ChainCosts:
    return analytic_table(model, topology, device).chain(model, topology)


# FLOPs.


@pytest.mark.parametrize("name, layers", [("llama-3-8b", 2.09), ("llama-2-7b", 0.60), ("gemma-2-9b", 3.96)])
def test_head_weighs_what_flops_say(name, layers):
    """Gemma's queries are wider than its hidden size (16 heads of 256), which makes its layers heavier than 4.13."""
    model = spec(name, window_size=None)
    assert head_flops(model, ONE) / layer_flops(model, ONE, 0) == pytest.approx(layers, abs=0.01)


def test_a_window_limits_attention_only_where_it_is_shorter():
    plain = layer_flops(spec(), ONE, 0)
    assert layer_flops(spec(window_size=(8191, 0)), ONE, 0) == plain
    assert layer_flops(spec(window_size=(1023, 0)), ONE, 0) < plain


def test_local_attention_computes_the_whole_square():
    model = spec()
    core = 2 * 2 * model.seq_length**2 * model.query_size
    assert layer_flops(spec(transformer_impl="local"), ONE, 0) - layer_flops(model, ONE, 0) == core / 2


# Seconds.


def test_backward_of_a_large_layer_is_twice_its_products_and_more_for_attention():
    layer = costs().mean_layer
    assert 2.0 < layer.backward_s / layer.forward_s < 2.3


def test_tensor_and_context_parallel_sizes_divide():
    for topology in (replace(ONE, tensor_size=2), replace(ONE, context_size=2)):
        divided, whole = costs(topology=topology), costs()
        assert divided.mean_layer.total_s == pytest.approx(whole.mean_layer.total_s / 2, rel=0.1)
        assert divided.head.forward_s == pytest.approx(whole.head.forward_s / 2, rel=0.1)


def test_micro_batch_multiplies_the_forward_pass():
    double = costs(topology=replace(ONE, micro_batch_size=2))
    assert double.mean_layer.forward_s == pytest.approx(2 * costs().mean_layer.forward_s, rel=0.02)


def test_embedding_backward_is_a_dense_gradient_however_short_the_sequence():
    short, long = (costs(seq_length=length).embedding.backward_s for length in (512, 1024))
    table = 128256 * 4096
    assert short > table * (2 + 2 + 4 + 4) / H100.bytes_per_s
    assert long == pytest.approx(short, rel=0.05)


def test_recompute_runs_forward_parts_again():
    plain, full = costs().mean_layer, costs(recompute_granularity="full", recompute_method="uniform").mean_layer
    assert full.forward_s == plain.forward_s
    assert full.backward_s == pytest.approx(plain.backward_s + plain.forward_s, rel=1e-6)
    selective = costs(recompute_activations=True).mean_layer
    assert plain.backward_s < selective.backward_s < full.backward_s
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}
    half = costs(**block).mean_layer.backward_s  # 4 stages x 4 layers of 32
    assert half - plain.backward_s == pytest.approx((full.backward_s - plain.backward_s) / 2, rel=0.01)


def test_unfused_gradient_accumulation_costs_more():
    assert costs(gradient_accumulation_fusion=False).head.backward_s > costs().head.backward_s


def test_cross_entropy_fusions_save_passes():
    fused = {"cross_entropy_loss_fusion": True}
    plain, native = costs().head, costs(**fused, cross_entropy_fusion_impl="native").head
    te = costs(**fused, cross_entropy_fusion_impl="te").head
    assert te.total_s < native.total_s < plain.total_s
    logits = 8192 * 128256
    assert plain.total_s - te.total_s > logits * 20 / H100.bytes_per_s


def test_a_prediction_depth_is_a_layer_apart_and_a_head_more():
    plain, predicting = costs("moe-and-mtp", mtp_num_layers=None), costs("moe-and-mtp")
    assert predicting.layers == plain.layers and plain.mtp.total_s == 0
    assert predicting.mtp.total_s > plain.layers[-1].total_s + plain.embedding.total_s
    assert predicting.head.total_s == pytest.approx(2 * plain.head.total_s, rel=0.01)
    full = costs("moe-and-mtp", recompute_granularity="full", recompute_method="uniform").mtp
    assert full.backward_s == pytest.approx(predicting.mtp.backward_s + predicting.mtp.forward_s, rel=0.05)


@pytest.mark.parametrize("module", ["core_attn", "mla_up_proj", "layernorm", "mlp", "moe_act", "shared_experts", "moe"])
def test_selected_parts_run_again(module):
    plain, full = costs("deepseek-v3"), costs("deepseek-v3", recompute_granularity="full", recompute_method="uniform")
    again = costs("deepseek-v3", recompute_granularity="selective", recompute_modules=[module])
    more = [one.backward_s - other.backward_s for one, other in zip(again.layers, plain.layers, strict=True)]
    dense, moe = more[0], more[-1]
    assert [one.forward_s for one in again.layers] == [one.forward_s for one in plain.layers]
    assert 0 < max(dense, moe) < full.layers[0].forward_s + full.layers[-1].forward_s
    assert (dense > 0, moe > 0) == (module not in ("moe_act", "shared_experts", "moe"), module != "mlp")


def test_a_layer_costs_what_its_parts_do():
    """The layers of a hybrid model are the halves of a transformer layer."""
    whole, halves = costs(num_layers=1).layers, costs(hybrid_layer_pattern="*-").layers
    assert sum(half.forward_s for half in halves) == pytest.approx(whole[0].forward_s)
    assert sum(half.backward_s for half in halves) == pytest.approx(whole[0].backward_s)


def test_layers_of_a_hybrid_model_cost_by_kind():
    chain, pattern = costs("nemotron-h-8b"), MODELS["nemotron-h-8b"]["hybrid_layer_pattern"]
    assert len(set(zip(pattern, chain.layers, strict=True))) == len(set(pattern)) == 3


def test_a_layer_of_nothing_costs_its_launch():
    block = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": True, "ffn_mult": None}}
    config = json.dumps({"block_configs": [block, {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 5.25}}]})
    empty, layer = costs(num_layers=2, heterogeneous_layers_config_encoded_json=config).layers
    assert empty.forward_s == H100.kernel_s and layer == costs().layers[0]


def test_layers_of_two_kinds_cost_apart():
    layers = costs("moe-and-mtp").layers
    assert layers[0] != layers[1] and len(set(layers[1:])) == 1


def test_fp8_speeds_layers_up_but_not_the_head():
    eight, sixteen = costs(fp8="hybrid"), costs()
    assert eight.mean_layer.forward_s < 0.75 * sixteen.mean_layer.forward_s
    assert eight.head == sixteen.head


def test_source_names_the_device():
    assert costs().source == "analytic (H100)"


# Devices.


@pytest.mark.parametrize(
    "name, device",
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GB200", "B200"),
        ("NVIDIA H20", "generic GPU"),
        ("Some Accelerator 3000", "generic GPU"),
        ("cpu", "CPU core"),
    ],
)
def test_devices_are_found_by_torchs_name(name, device):
    assert device_named(name).name == device


def test_speeds_given_replace_those_of_the_table():
    given = device_chosen("h100,tflops=494.5,tbps=2")
    half = 494.5 / (0.7 * 989)
    assert given.bytes_per_s == 2e12
    assert given.matmul_flops_per_s == pytest.approx({name: half * r for name, r in H100.matmul_flops_per_s.items()})
    assert device_chosen("generic,tbps=1").matmul_flops_per_s == device_chosen("generic").matmul_flops_per_s
    assert given.name == "H100, 494.5 TFLOP/s, 2 TB/s"


@pytest.mark.parametrize(
    "text", ["H100,tflops=0", "H100,tflops=fast", "H100,tbps=nan", "H100,watts=700", "H100,tbps", "H20,tbps=4", "H100,"]
)
def test_speeds_that_cannot_be_are_refused(text):
    with pytest.raises(BalanceError):
        device_chosen(text)


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    device = Device("toy", {"fp32": 10.0}, bytes_per_s=5.0, kernel_s=1.0)
    assert device.seconds([Kernel(bytes_moved=10)]) == 3.0
    assert device.seconds([Kernel(bytes_moved=10, flops=100), Kernel(bytes_moved=500, flops=100)]) == 11.0 + 101.0


def test_precision_that_a_device_lacks_is_an_error():
    with pytest.raises(BalanceError, match="A100 has no fp8"):
        costs(device=device_named("NVIDIA A100-SXM4-80GB"), fp8="hybrid")


# Weights of head and embedding in layers, measured on one core with Megatron's local modules (megatron-core 0.19.2,
# fp32, main gradients added as DDP adds them): head forward, head backward, head in all, embedding backward.
# Processor time, least of 6 to 20 rounds, median of three runs.
CPU_GPT = {"gradient_accumulation_fusion": False, "transformer_impl": "local", "max_position_embeddings": 128,
           "seq_length": 128, "num_attention_heads": 8}  # fmt: skip
MEASURED = [
    ({"hidden_size": 256, "num_layers": 16, "padded_vocab_size": 65536}, 1, (19.4, 18.0, 18.5, 4.8)),
    ({"hidden_size": 256, "num_layers": 16, "padded_vocab_size": 65536, "num_attention_heads": 4}, 1,
     (21.0, 17.8, 19.0, 4.9)),
    ({"hidden_size": 512, "num_layers": 12, "padded_vocab_size": 32768}, 4, (6.0, 4.9, 5.3, 0.55)),
    ({"hidden_size": 256, "num_layers": 12, "padded_vocab_size": 32768}, 4, (11.1, 8.0, 9.1, 0.73)),
]  # fmt: skip


@pytest.mark.parametrize("arguments, micro_batch_size, measured", MEASURED)
def test_cpu_weights_are_near_measured_ones(arguments, micro_batch_size, measured):
    topology = Topology(pipeline_size=2, num_microbatches=16, micro_batch_size=micro_batch_size)
    chain = chain_of(ModelSpec.from_arguments({**CPU_GPT, **arguments}), topology, CPU_CORE)
    whole = chain.head.total_s / chain.mean_layer.total_s
    weights = (*chain.in_layers(chain.head), whole, chain.in_layers(chain.embedding)[1])
    assert weights == pytest.approx(measured, rel=0.25)
