"""A model read from Megatron's arguments by name, validated or not: what Megatron fills in later is filled in by its rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text
from megatron_balance.model.heterogeneous import block_kinds
from megatron_balance.model.hybrid import HybridPattern
from megatron_balance.model.kinds import Experts, LatentAttention, LayerKind, Mamba, Recompute

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

_BY_HAND = "Leave out --balanced-pipeline and give Megatron a split by hand with --pipeline-model-parallel-layout."

# Arguments that change what a layer is in ways that have no cost here yet, and what they build.
_NOT_COVERED = {
    "experimental_attention_variant": "an experimental or linear attention variant",
    "linear_attention_type": "linear attention",
    "enable_mhc_connections": "several residual streams (hyper-connections)",
    "mtp_use_repeated_layer": "multi-token prediction with one repeated layer",
    "spec": "a layer specification of your own",
}


def refuse_uncovered(arguments: Mapping[str, Any], flag: str = "--balanced-pipeline", remedy: str = _BY_HAND) -> None:
    """Refuse models that have no costs yet.

    A hybrid model's layer specification is Megatron's own, whose layers the pattern names.

    Args:
        flag: what needs the costs.
        remedy: the way round.

    Raises:
        BalanceError: names what is not covered, and the way round.
    """
    hybrid = bool(arguments.get("is_hybrid_model")) or _pattern_text(arguments) is not None
    for name, what in _NOT_COVERED.items():
        if arguments.get(name) and not (name == "spec" and hybrid):
            raise BalanceError(f"{flag} does not know the cost of {what} ({name} is set). {remedy}")


def spec_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the ``ModelSpec`` that Megatron builds from ``arguments``.

    Raises:
        BalanceError: as ``ModelSpec.from_arguments``.
    """
    refuse_uncovered(arguments)
    hidden = _size(arguments, "hidden_size")
    heads = _size(arguments, "num_attention_heads")
    bias = arguments.get("add_bias_linear", True)
    dtype = next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32")
    pattern = hybrid_pattern(arguments)
    layers, mtp_layers = layer_kinds(arguments), pattern.mtp_layers if pattern else ()
    kinds = {*layers, *mtp_layers}
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": _ffn_hidden_size(arguments),
        "num_attention_heads": heads,
        "num_query_groups": _num_query_groups(arguments),
        "kv_channels": _kv_channels(arguments, hidden, heads),
        "padded_vocab_size": _padded_vocab_size(arguments),
        "seq_length": _size(arguments, "seq_length", "encoder_seq_length"),
        "layers": layers,
        "max_position_embeddings": _size(arguments, "max_position_embeddings", default=0),
        "position_embedding_type": _position_embedding_type(arguments),
        "normalization": arguments.get("normalization") or "LayerNorm",
        "gated": bool(arguments.get("swiglu") or arguments.get("quick_geglu")),
        "add_bias_linear": bias,
        "add_qkv_bias": bool(bias or arguments.get("add_qkv_bias")),
        "qk_layernorm": bool(arguments.get("qk_layernorm")),
        "learnable_softmax": arguments.get("softmax_type") == "learnable",
        "attention_output_gate": bool(arguments.get("attention_output_gate")),
        "latent_attention": _latent_attention(arguments, pattern),
        "untied_head": bool(arguments.get("untie_embeddings_and_output_weights")),
        "mtp_num_layers": _mtp_num_layers(arguments, pattern),
        "mtp_layers": mtp_layers,
        "experts": _experts(arguments),
        "mamba": _mamba(arguments, hidden) if any(kind.mixer == "mamba" for kind in kinds) else None,
        "dtype": dtype,
        "matmul_dtype": next((name for name in ("fp8", "fp4") if arguments.get(name)), dtype),
        "main_gradient_bytes": _main_gradient_bytes(arguments, dtype),
        "gradient_accumulation_fusion": arguments.get("gradient_accumulation_fusion", True),
        "fused_kernels": arguments.get("transformer_impl", "transformer_engine") != "local",
        "cross_entropy_fusion": _cross_entropy_fusion(arguments),
        "sequence_parallel": bool(arguments.get("sequence_parallel")),
        "recompute": _recompute(arguments),
        "hidden_dropout": _probability(arguments, "hidden_dropout"),
        "attention_dropout": _probability(arguments, "attention_dropout"),
    }


def check_parallel_sizes(fields: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """What Megatron checks only while it builds the model, of what ``spec_fields`` gave.

    Raises:
        BalanceError: a size does not divide.
    """
    tensor = _size(arguments, "tensor_model_parallel_size", default=1)
    sizes = {name: fields[name] for name in ("num_attention_heads", "ffn_hidden_size", "padded_vocab_size")}
    if mamba := fields["mamba"]:
        sizes |= {"mamba_num_heads": mamba.num_heads, "mamba_num_groups": mamba.num_groups}
    for kind in {*fields["layers"]}:
        if kind.ffn_hidden_size:
            sizes[f"ffn_hidden_size of {kind} layers"] = kind.ffn_hidden_size
    for name, size in sizes.items():
        check_divides(tensor, "tensor_model_parallel_size", size, name)
    groups = fields["num_query_groups"]
    if groups % tensor and tensor % groups:
        raise BalanceError(
            f"num_query_groups ({groups}) is no multiple or divisor of tensor_model_parallel_size ({tensor}): choose others"
        )
    context = _size(arguments, "context_parallel_size", default=1)
    if context > 1:
        check_divides(2 * context, "2 * context_parallel_size", fields["seq_length"], "seq_length")


def check_divides(divisor: int, divisor_name: str, number: int, name: str) -> None:
    if number % divisor:
        raise BalanceError(f"{name} ({number}) is not divisible by {divisor_name} ({divisor}): choose others")


def _size(arguments: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of ``names`` that has a value, a whole number of 1 or more; else ``default``."""
    name = next((name for name in names if arguments.get(name) is not None), None)
    if name is None:
        if default is None:
            raise BalanceError(f"{names[0]} is not given: add --{names[0].replace('_', '-')}")
        return default
    value = arguments[name]
    smallest = 0 if default == 0 else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise BalanceError(f"{name} must be a whole number of {smallest} or more, not {value!r}")
    return value


def _probability(arguments: Mapping[str, Any], name: str) -> float:
    """Megatron drops out a tenth by default."""
    value = arguments.get(name)
    return 0.1 if value is None else float(value)


def _kv_channels(arguments: Mapping[str, Any], hidden: int, heads: int) -> int:
    if arguments.get("kv_channels") is None:
        check_divides(heads, "num_attention_heads", hidden, "hidden_size")
    return _size(arguments, "kv_channels", default=hidden // heads)


def _num_query_groups(arguments: Mapping[str, Any]) -> int:
    grouped = arguments.get("group_query_attention") and not arguments.get("multi_latent_attention")
    return _size(arguments, "num_query_groups" if grouped else "num_attention_heads")


def _ffn_hidden_size(arguments: Mapping[str, Any]) -> int:
    """Megatron's rule: SwiGLU keeps the parameters of an ungated MLP of 4 h, rounded down to a multiple of 64."""
    hidden = _size(arguments, "hidden_size")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if arguments.get("swiglu") else 4 * hidden
    return _size(arguments, "ffn_hidden_size", default=default)


def _padded_vocab_size(arguments: Mapping[str, Any]) -> int:
    if arguments.get("padded_vocab_size") is not None:
        return _size(arguments, "padded_vocab_size")
    vocabulary = _size(arguments, "vocab_size")
    if not arguments.get("pad_vocab_size", True):
        return vocabulary
    tensor = _size(arguments, "tensor_model_parallel_size", default=1)
    multiple = _size(arguments, "make_vocab_size_divisible_by", default=128) * tensor
    return math.ceil(vocabulary / multiple) * multiple


def _position_embedding_type(arguments: Mapping[str, Any]) -> str:
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    return arguments.get("position_embedding_type") or "learned_absolute"


def layer_kinds(arguments: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """The kind of each layer, from Megatron's arguments by name, validated or not.

    Raises:
        BalanceError: a pattern, a frequency or a configuration of single layers is none.
    """
    if pattern := hybrid_pattern(arguments):
        kinds = pattern.layers
    elif (blocks := _heterogeneous(arguments)) is not None:
        kinds = blocks
    else:
        count = _size(arguments, "num_layers", "encoder_num_layers")
        moe = _per_layer(arguments, "moe_layer_freq", count, lambda every, index: index % every == 0)
        kinds = tuple(LayerKind(moe=bool(arguments.get("num_experts")) and each) for each in moe)
    windowed = _per_layer(arguments, "window_attn_skip_freq", len(kinds), lambda every, index: (index + 1) % every != 0)
    window = arguments.get("window_size")
    # Megatron's window is (keys before, keys after); -1 before means no limit.
    span = window[0] if window and window[0] >= 0 else None
    return tuple(
        replace(kind, window=span) if kind.mixer == "attention" and limited else kind
        for kind, limited in zip(kinds, windowed, strict=True)
    )


def hybrid_pattern(arguments: Mapping[str, Any]) -> HybridPattern | None:
    """The layer pattern of a hybrid (Mamba) model, of whatever Megatron's version; None for other models.

    Raises:
        BalanceError: it is no pattern, or a hybrid model has none.
    """
    text = _pattern_text(arguments)
    if text is None:
        for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"):
            if arguments.get(name):
                raise BalanceError(
                    f"{name} is {arguments[name]} without a pattern of layers, which Megatron then makes by itself: give the"
                    " pattern that it prints with --hybrid-override-pattern"
                )
        if arguments.get("is_hybrid_model"):
            raise BalanceError("is_hybrid_model is set without a pattern of layers: add --hybrid-layer-pattern")
        return None
    depths = _size(arguments, "mtp_num_layers", default=0)
    if "/" not in text and depths:
        mtp = arguments.get("mtp_hybrid_override_pattern")
        if not mtp:
            raise BalanceError(
                f"mtp_num_layers is {depths}, but hybrid_layer_pattern {text!r} does not say of which layers: add them"
                " behind / once a depth"
            )
        text += f"/{mtp}" * depths
    return HybridPattern.parse(text)


def _pattern_text(arguments: Mapping[str, Any]) -> str | None:
    return arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern") or None


def _heterogeneous(arguments: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    text, path = (arguments.get(f"heterogeneous_layers_config_{what}") for what in ("encoded_json", "path"))
    if not text and not path:
        return None
    blocks = block_kinds(
        text or read_text(path, f"the heterogeneous layers configuration {path}"),
        _size(arguments, "num_attention_heads"),
        _size(arguments, "hidden_size"),
        _num_query_groups(arguments),
        _ffn_hidden_size(arguments),
    )
    count = _size(arguments, "num_layers", "encoder_num_layers", default=len(blocks))
    if count != len(blocks):
        raise BalanceError(
            f"num_layers is {count}, but the heterogeneous layers configuration describes {len(blocks)}: make them equal"
        )
    return blocks


def _per_layer(
    arguments: Mapping[str, Any], name: str, count: int, every_nth: Callable[[int, int], bool]
) -> list[bool]:
    """A layer frequency of Megatron's: an integer N, read by ``every_nth(N, index)``, or a list of 0 and 1."""
    value = arguments.get(name)
    if value is None:
        return [True] * count
    if isinstance(value, int) and value >= 1:
        return [every_nth(value, index) for index in range(count)]
    if isinstance(value, list) and len(value) == count:
        return [bool(entry) for entry in value]
    raise BalanceError(f"{name} must be a whole number or a list of {count} entries, one a layer, not {value!r}")


def _latent_attention(arguments: Mapping[str, Any], pattern: HybridPattern | None) -> LatentAttention | None:
    if not (arguments.get("multi_latent_attention") or (pattern and "+" in pattern.letters + pattern.mtp)):
        return None
    if arguments.get("attention_output_gate"):
        raise BalanceError("attention_output_gate does not go with multi-latent attention: leave one of them out")
    return LatentAttention(
        q_lora_rank=_size(arguments, "q_lora_rank") if arguments.get("q_lora_rank") is not None else None,
        kv_lora_rank=_size(arguments, "kv_lora_rank", default=32),
        qk_head_dim=_size(arguments, "qk_head_dim", default=128),
        qk_pos_emb_head_dim=_size(arguments, "qk_pos_emb_head_dim", default=64),
        v_head_dim=_size(arguments, "v_head_dim", default=128),
    )


def _mamba(arguments: Mapping[str, Any], hidden: int) -> Mamba:
    """Without a number of heads there are as many as make twice the hidden size."""
    head_dim = _size(arguments, "mamba_head_dim", default=64)
    if arguments.get("mamba_num_heads") is None:
        check_divides(head_dim, "mamba_head_dim", 2 * hidden, "2 * hidden_size")
    mamba = Mamba(
        num_heads=_size(arguments, "mamba_num_heads", default=2 * hidden // head_dim),
        head_dim=head_dim,
        state_dim=_size(arguments, "mamba_state_dim", default=128),
        num_groups=_size(arguments, "mamba_num_groups", default=8),
    )
    check_divides(mamba.num_groups, "mamba_num_groups", mamba.num_heads, "mamba_num_heads")
    return mamba


def _mtp_num_layers(arguments: Mapping[str, Any], pattern: HybridPattern | None) -> int:
    return pattern.mtp_num_layers if pattern else _size(arguments, "mtp_num_layers", default=0)


def _experts(arguments: Mapping[str, Any]) -> Experts | None:
    if not arguments.get("num_experts"):
        return None
    tensor = _size(arguments, "tensor_model_parallel_size", default=1)
    tensor_shards = _size(arguments, "expert_tensor_parallel_size", default=tensor)
    latent = arguments.get("moe_latent_size") is not None
    count, topk = _size(arguments, "num_experts"), _size(arguments, "moe_router_topk", default=2)
    if topk > count:
        raise BalanceError(f"moe_router_topk ({topk}) is more than num_experts ({count}): choose others")
    expert_shards = _size(arguments, "expert_model_parallel_size", default=1)
    check_divides(expert_shards, "expert_model_parallel_size", count, "num_experts")
    return Experts(
        count=count,
        topk=topk,
        ffn_hidden_size=_size(arguments, "moe_ffn_hidden_size", default=_ffn_hidden_size(arguments)),
        shared_ffn_hidden_size=_size(arguments, "moe_shared_expert_intermediate_size", default=0),
        shards=expert_shards * tensor_shards,
        tensor_shards=tensor_shards,
        shared_gate=bool(arguments.get("moe_shared_expert_gate")),
        latent_size=_size(arguments, "moe_latent_size") if latent else None,
    )


def _main_gradient_bytes(arguments: Mapping[str, Any], dtype: str) -> int:
    """Megatron accumulates bf16 gradients in fp32 unless told otherwise, fp16 ones only when told so."""
    in_fp32 = arguments.get("accumulate_allreduce_grads_in_fp32")
    if dtype == "bf16" and not arguments.get("grad_reduce_in_bf16"):
        in_fp32 = in_fp32 or str(arguments.get("main_grads_dtype", "fp32")) in ("fp32", "torch.float32")
    return 4 if in_fp32 else DTYPE_BYTES[dtype]


def _cross_entropy_fusion(arguments: Mapping[str, Any]) -> str | None:
    return arguments.get("cross_entropy_fusion_impl", "native") if arguments.get("cross_entropy_loss_fusion") else None


def _recompute(arguments: Mapping[str, Any]) -> Recompute:
    granularity = arguments.get("recompute_granularity")
    if arguments.get("recompute_activations"):
        granularity = "selective"
    return Recompute(
        granularity=granularity,
        method=arguments.get("recompute_method") if granularity == "full" else None,
        num_layers=_size(arguments, "recompute_num_layers", default=1) if granularity == "full" else None,
        modules=tuple(arguments.get("recompute_modules") or ["core_attn"]) if granularity == "selective" else (),
    )
