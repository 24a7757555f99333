"""The model as a pipeline split sees it: the chain embedding, transformer layers, head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from typing import Any

from megatron_balance.errors import BalanceError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

_BY_HAND = "Leave out --balanced-pipeline and give Megatron a split by hand with --pipeline-model-parallel-layout."
_IN_PATTERN = "Leave out --balanced-pipeline and mark the stages with | in --hybrid-layer-pattern."

# Arguments that change what a layer is in ways that have no cost here yet: what they build, and the way round.
_NOT_COVERED = {
    "multi_latent_attention": ("multi-latent attention", _BY_HAND),
    "experimental_attention_variant": ("an experimental or linear attention variant", _BY_HAND),
    "linear_attention_type": ("linear attention", _BY_HAND),
    "attention_output_gate": ("gated attention output", _BY_HAND),
    "hybrid_layer_pattern": ("a hybrid (Mamba) model", _IN_PATTERN),
    "hybrid_override_pattern": ("a hybrid (Mamba) model", _IN_PATTERN),
    "is_hybrid_model": ("a hybrid (Mamba) model", _IN_PATTERN),
    "heterogeneous_layers_config_path": ("layers that each have a configuration of their own", _BY_HAND),
    "heterogeneous_layers_config_encoded_json": ("layers that each have a configuration of their own", _BY_HAND),
    "moe_latent_size": ("experts in a latent space", _BY_HAND),
    "mtp_use_repeated_layer": ("multi-token prediction with one repeated layer", _BY_HAND),
    "spec": ("a layer specification of your own", _BY_HAND),
}


@dataclass(frozen=True)
class LayerKind:
    """What can make one transformer layer cost something else than its neighbour.

    Attributes:
        moe: the MLP is a mixture of experts.
        window: earlier keys that a query attends to at most (sliding-window attention); None is all of them.
    """

    moe: bool = False
    window: int | None = None

    def __str__(self) -> str:
        return ("moe" if self.moe else "dense") + (f"/{self.window}" if self.window else "")


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of the layers that have one.

    Attributes:
        count: routed experts.
        topk: experts that each token visits.
        ffn_hidden_size: width of one expert.
        shared_ffn_hidden_size: width of the shared experts together; 0 without any.
        shards: ranks over which the routed experts' weights are spread (expert parallel size times expert tensor
            parallel size).
        tensor_shards: ranks over which each of them is spread (expert tensor parallel size).
        shared_gate: a learned gate scales what the shared experts add.
    """

    count: int
    topk: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shards: int = 1
    tensor_shards: int = 1
    shared_gate: bool = False


@dataclass(frozen=True)
class Recompute:
    """Megatron's activation recomputation, in the words of its flags; ``granularity`` None is none at all."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    def full_share(self, num_layers: int, num_stages: int) -> float:
        """Share of the layers that are computed again as a whole.

        The method ``block`` recomputes so many layers of every stage. Which ones depends on the split, so each layer
        carries its share.
        """
        if self.granularity != "full":
            return 0.0
        if self.method != "block":
            return 1.0
        return min(1.0, self.num_layers * num_stages / num_layers)


@dataclass(frozen=True)
class ModelSpec:
    """A GPT model of Megatron's, in Megatron's words.

    Attributes:
        hidden_size, ffn_hidden_size: widths of the residual stream and of the dense MLP.
        num_attention_heads, num_query_groups, kv_channels: query heads, key and value heads, width of one head.
        padded_vocab_size: rows of the embedding and of the output layer, over all tensor-parallel ranks.
        seq_length: tokens in a sequence, over all context-parallel ranks.
        layers: kind of each transformer layer, in model order.
        max_position_embeddings: rows of the learned position embedding.
        position_embedding_type: ``learned_absolute`` (a table beside the word embedding), ``rope``, ``none`` ...
        normalization: ``LayerNorm`` (weight and bias) or ``RMSNorm`` (weight).
        gated: SwiGLU or GEGLU, with a first MLP matrix twice as wide.
        add_bias_linear, add_qkv_bias, qk_layernorm, learnable_softmax: what has parameters of its own.
        untied_head: embedding and output layer have weights of their own.
        mtp_num_layers: multi-token-prediction depths.
        experts: the mixture of experts of those ``layers`` that have one.
        dtype: parameters and activations: ``fp32``, ``bf16`` or ``fp16``.
        matmul_dtype: matrix products inside the layers: ``dtype``, ``fp8`` or ``fp4``.
        main_gradient_bytes: width of a value in the buffer in which gradients of micro-batches add up.
        gradient_accumulation_fusion: weight gradients are added to that buffer inside their matrix product.
        fused_kernels: Transformer Engine's layers (attention that skips the masked half and never writes its scores),
            not Megatron's local ones.
        cross_entropy_fusion: None, ``native`` or ``te``.
        sequence_parallel: norms and residuals are split over the tensor-parallel ranks.
        recompute: what is computed again in the backward pass.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    seq_length: int
    layers: tuple[LayerKind, ...]
    max_position_embeddings: int = 0
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    gated: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = True
    qk_layernorm: bool = False
    learnable_softmax: bool = False
    untied_head: bool = False
    mtp_num_layers: int = 0
    experts: Experts | None = None
    dtype: str = "fp32"
    matmul_dtype: str = "fp32"
    main_gradient_bytes: int = 4
    gradient_accumulation_fusion: bool = True
    fused_kernels: bool = True
    cross_entropy_fusion: str | None = None
    sequence_parallel: bool = False
    recompute: Recompute = Recompute()

    def __post_init__(self) -> None:
        if not self.layers:
            raise BalanceError("num_layers is 0: a pipeline split needs --num-layers 1 or more")
        for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
                     "padded_vocab_size", "seq_length"):  # fmt: skip
            if getattr(self, name) < 1:
                raise BalanceError(f"{name} must be at least 1, not {getattr(self, name)}")
        _check_divides(self.num_query_groups, "num_query_groups", self.num_attention_heads, "num_attention_heads")
        if self.experts is None and any(layer.moe for layer in self.layers):
            raise BalanceError("some layers are a mixture of experts, but num_experts is not given")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> ModelSpec:
        """The model that Megatron builds from ``arguments``, its argument names with their values.

        Takes ``vars(args)`` once Megatron has validated them and built its tokenizer, or what a command line gives:
        whatever Megatron would fill in later is filled in by its rules (``padded_vocab_size`` from ``vocab_size``,
        which a tokenizer may still raise by its special tokens). A missing key is Megatron's default.

        Raises:
            BalanceError: a size is missing, not a whole number of 1 or more or does not divide as Megatron needs it;
                or the model is of a kind that has no costs yet.
        """
        refuse_uncovered(arguments)
        hidden = _size(arguments, "hidden_size")
        heads = _size(arguments, "num_attention_heads")
        bias = arguments.get("add_bias_linear", True)
        dtype = next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32")
        spec = cls(
            hidden_size=hidden,
            ffn_hidden_size=_size(arguments, "ffn_hidden_size", default=_default_ffn_hidden_size(arguments, hidden)),
            num_attention_heads=heads,
            num_query_groups=_size(arguments, "num_query_groups") if arguments.get("group_query_attention") else heads,
            kv_channels=_kv_channels(arguments, hidden, heads),
            padded_vocab_size=_padded_vocab_size(arguments),
            seq_length=_size(arguments, "seq_length", "encoder_seq_length"),
            layers=layer_kinds(arguments),
            max_position_embeddings=_size(arguments, "max_position_embeddings", default=0),
            position_embedding_type=_position_embedding_type(arguments),
            normalization=arguments.get("normalization") or "LayerNorm",
            gated=bool(arguments.get("swiglu") or arguments.get("quick_geglu")),
            add_bias_linear=bias,
            add_qkv_bias=bool(bias or arguments.get("add_qkv_bias")),
            qk_layernorm=bool(arguments.get("qk_layernorm")),
            learnable_softmax=arguments.get("softmax_type") == "learnable",
            untied_head=bool(arguments.get("untie_embeddings_and_output_weights")),
            mtp_num_layers=_size(arguments, "mtp_num_layers", default=0),
            experts=_experts(arguments, hidden),
            dtype=dtype,
            matmul_dtype=next((name for name in ("fp8", "fp4") if arguments.get(name)), dtype),
            main_gradient_bytes=_main_gradient_bytes(arguments, dtype),
            gradient_accumulation_fusion=arguments.get("gradient_accumulation_fusion", True),
            fused_kernels=arguments.get("transformer_impl", "transformer_engine") != "local",
            cross_entropy_fusion=_cross_entropy_fusion(arguments),
            sequence_parallel=bool(arguments.get("sequence_parallel")),
            recompute=_recompute(arguments),
        )
        _check_parallel_sizes(spec, arguments)
        return spec

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of all query groups."""
        return self.num_query_groups * self.kv_channels

    @property
    def fingerprint(self) -> dict[str, int | str | bool | float | None]:
        """The fields that decide a split, flat, as JSON can hold them: two models that differ in none split alike."""
        return {"layers": _describe(self.layers), **_flatten(self, skip="layers")}


def refuse_uncovered(arguments: Mapping[str, Any]) -> None:
    """Refuse models that have no costs yet.

    Raises:
        BalanceError: names what is not covered, and the way round.
    """
    for name, (what, remedy) in _NOT_COVERED.items():
        if arguments.get(name):
            raise BalanceError(f"--balanced-pipeline does not know the cost of {what} ({name} is set). {remedy}")


def _check_divides(divisor: int, divisor_name: str, number: int, name: str) -> None:
    if number % divisor:
        raise BalanceError(f"{name} ({number}) is not divisible by {divisor_name} ({divisor}): choose others")


def _check_parallel_sizes(spec: ModelSpec, arguments: Mapping[str, Any]) -> None:
    """What Megatron checks only while it builds the model."""
    tensor = _size(arguments, "tensor_model_parallel_size", default=1)
    for name in ("num_attention_heads", "ffn_hidden_size", "padded_vocab_size"):
        _check_divides(tensor, "tensor_model_parallel_size", getattr(spec, name), name)
    context = _size(arguments, "context_parallel_size", default=1)
    if context > 1:
        _check_divides(2 * context, "2 * context_parallel_size", spec.seq_length, "seq_length")


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


def _kv_channels(arguments: Mapping[str, Any], hidden: int, heads: int) -> int:
    if arguments.get("kv_channels") is None:
        _check_divides(heads, "num_attention_heads", hidden, "hidden_size")
    return _size(arguments, "kv_channels", default=hidden // heads)


def _default_ffn_hidden_size(arguments: Mapping[str, Any], hidden: int) -> int:
    """Megatron's rule: SwiGLU keeps the parameters of an ungated MLP of 4 h, rounded down to a multiple of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if arguments.get("swiglu") else 4 * hidden


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
    """The kind of each transformer layer, from Megatron's arguments by name, validated or not."""
    count = _size(arguments, "num_layers", "encoder_num_layers")
    moe = _per_layer(arguments, "moe_layer_freq", count, lambda every, index: index % every == 0)
    windowed = _per_layer(arguments, "window_attn_skip_freq", count, lambda every, index: (index + 1) % every != 0)
    has_experts, window = bool(arguments.get("num_experts")), arguments.get("window_size")
    # Megatron's window is (keys before, keys after); -1 before means no limit.
    span = window[0] if window and window[0] >= 0 else None
    return tuple(
        LayerKind(moe=has_experts and moe[index], window=span if windowed[index] else None) for index in range(count)
    )


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


def _experts(arguments: Mapping[str, Any], hidden: int) -> Experts | None:
    if not arguments.get("num_experts"):
        return None
    ffn = _size(arguments, "ffn_hidden_size", default=_default_ffn_hidden_size(arguments, hidden))
    tensor = _size(arguments, "tensor_model_parallel_size", default=1)
    tensor_shards = _size(arguments, "expert_tensor_parallel_size", default=tensor)
    return Experts(
        count=_size(arguments, "num_experts"),
        topk=_size(arguments, "moe_router_topk", default=2),
        ffn_hidden_size=_size(arguments, "moe_ffn_hidden_size", default=ffn),
        shared_ffn_hidden_size=_size(arguments, "moe_shared_expert_intermediate_size", default=0),
        shards=_size(arguments, "expert_model_parallel_size", default=1) * tensor_shards,
        tensor_shards=tensor_shards,
        shared_gate=bool(arguments.get("moe_shared_expert_gate")),
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


def _describe(layers: tuple[LayerKind, ...]) -> str:
    """Runs of equal layers: ``3 dense, 58 moe``."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(layers))


def _flatten(value: Any, prefix: str = "", skip: str = "") -> dict[str, int | str | bool | float | None]:
    flat: dict[str, int | str | bool | float | None] = {}
    for name in (field.name for field in fields(value) if field.name != skip):
        entry = getattr(value, name)
        if is_dataclass(entry):
            flat |= _flatten(entry, prefix=f"{prefix}{name}_")
        else:
            flat[prefix + name] = " ".join(entry) if isinstance(entry, tuple) else entry
    return flat
