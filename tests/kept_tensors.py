"""Builds the models given and prints the bytes that each element keeps for its backward pass, as JSON.

A process of its own: FILE for the rendezvous, then the models as JSON, Megatron's argument names with values, by name.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter

from megatron_balance import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

_SAME = (
    "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels add_bias_linear normalization qk_layernorm"
    " mtp_num_layers moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk bf16"
    " recompute_granularity recompute_method recompute_num_layers recompute_modules"
).split()


def config(arguments: dict) -> TransformerConfig:
    gated = arguments.get("swiglu", False)
    return TransformerConfig(
        **{name: arguments[name] for name in _SAME if name in arguments},
        num_query_groups=arguments.get("num_query_groups"),
        num_moe_experts=arguments.get("num_experts"),
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        bias_activation_fusion=gated or not arguments.get("num_experts"),
        params_dtype=torch.bfloat16 if arguments.get("bf16") else torch.float32,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def build(arguments: dict) -> GPTModel:
    settings = config(arguments)
    if settings.num_moe_experts:
        layers = gpt_layer_specs.get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    else:
        layers = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=settings.qk_layernorm, normalization=settings.normalization
        )
    mtp = None
    if settings.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(settings, layers, use_transformer_engine=False)
    model = GPTModel(
        settings,
        layers,
        arguments["padded_vocab_size"],
        arguments["max_position_embeddings"],
        share_embeddings_and_output_weights=not arguments.get("untie_embeddings_and_output_weights"),
        position_embedding_type=arguments.get("position_embedding_type", "learned_absolute"),
        mtp_block_spec=mtp,
    )
    return model.bfloat16() if settings.bf16 else model


def kept(arguments: dict) -> dict[str, int]:
    """Bytes of the storages that autograd saves, by the element that saves them first; parameters are left out."""
    model = build(arguments)
    counted = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: Counter[str] = Counter()
    running, alive = ["embedding"], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            alive.append(tensor)  # so that no other storage gets its place
            sizes[running[0]] += storage.nbytes()
        return tensor

    parts = {f"layer {index}": layer for index, layer in enumerate(model.decoder.layers)}
    parts |= {"head": model.decoder.final_layernorm}
    if model.mtp_process:
        parts |= {"mtp": model.mtp, "outputs": model.output_layer}
    for name, part in parts.items():
        part.register_forward_pre_hook(lambda *_, name=name: running.__setitem__(0, name))
    shape = (arguments["micro_batch_size"], arguments["seq_length"])
    tokens = torch.randint(arguments["padded_vocab_size"], shape)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, positions, None, labels=tokens).sum()
    return dict(sizes)


if __name__ == "__main__":
    store, models = sys.argv[1:]
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    with contextlib.redirect_stdout(sys.stderr):
        results = {name: kept(arguments) for name, arguments in json.loads(models).items()}
    print(json.dumps(results))
