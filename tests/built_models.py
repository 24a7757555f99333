"""Build small models with Megatron's local layers on the CPU; print their parameters by part and what they compute.

``python built_models.py STORE MODELS``: a file for the rendezvous, and models as JSON, Megatron's arguments by name.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import types
from typing import Any

import torch

from megatron_balance import cpu


class _GatedNorm(torch.nn.Module):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))


def _provide(name: str, **contents: Any) -> None:
    """A stand-in for a package of GPU kernels, so that Megatron's Mamba layer can be built, though not run."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


cpu.install()
_provide("einops", rearrange=None, repeat=None)
_provide("mamba_ssm")
_provide("mamba_ssm.ops")
_provide("mamba_ssm.ops.triton")
_provide("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_GatedNorm)
_provide(
    "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=lambda: None
)

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.utils.flop_counter import FlopCounterMode

_RENAMED = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
_NOT_OF_THE_CONFIG = {
    "seq_length", "padded_vocab_size", "max_position_embeddings", "position_embedding_type", "group_query_attention",
    "untie_embeddings_and_output_weights", "transformer_impl",
}  # fmt: skip


class _LatentDotProduct(DotProductAttention):
    """Megatron's local attention, let keys and values be of widths of their own; only Transformer Engine's does stock."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _config(arguments: dict[str, Any]) -> TransformerConfig:
    values = {_RENAMED.get(name, name): value for name, value in arguments.items() if name not in _NOT_OF_THE_CONFIG}
    heterogeneous = "heterogeneous_layers_config_encoded_json" in arguments
    kind = HeterogeneousTransformerConfig if heterogeneous else TransformerConfig
    if values.pop("multi_latent_attention", False):
        kind, values["rope_type"] = MLATransformerConfig, "rope"
    activation = torch.nn.functional.silu if arguments.get("swiglu") else torch.nn.functional.gelu
    return kind(
        **values,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        activation_func=activation,
        transformer_impl="local",
    )


def _layers(config: TransformerConfig) -> Any:
    if isinstance(config, HeterogeneousTransformerConfig):
        return heterogeneous_layer_specs.get_gpt_heterogeneous_layer_spec(config, use_te=False)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if config.multi_latent_attention:
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _LatentDotProduct
    return block


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _mixer(arguments: dict[str, Any]) -> dict[str, Any]:
    """A Mamba mixer alone."""
    config = _config({name: value for name, value in arguments.items() if name != "hybrid_layer_pattern"})
    matrices = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mixer = MambaMixer(config, matrices, config.hidden_size, layer_number=1, pg_collection=groups)
    return {"mixer": _parameters(mixer)}


def _built(arguments: dict[str, Any]) -> dict[str, Any]:
    if "hybrid_layer_pattern" in arguments:
        return _mixer(arguments)
    config = _config(arguments)
    layers, mtp = _layers(config), None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    model = GPTModel(
        config,
        layers,
        arguments["padded_vocab_size"],
        arguments["seq_length"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )
    tokens = torch.arange(arguments["seq_length"]).unsqueeze(0)
    mask = torch.ones(len(tokens[0]), len(tokens[0])).triu(1).bool()[None, None]
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, mask, labels=tokens)
    return {
        "layers": [_parameters(layer) for layer in model.decoder.layers],
        "parameters": _parameters(model),
        "flops": counter.get_total_flops(),
    }


if __name__ == "__main__":
    cpu.name_missing_kernels()
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for name, arguments in json.loads(sys.argv[2]).items():
        try:
            built = _built(arguments)
        except (TypeError, ImportError) as error:
            built = {"cannot": str(error)}
        print(json.dumps({name: built}), flush=True)
