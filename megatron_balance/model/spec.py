"""A model in Megatron's words."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import groupby
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.arguments import DTYPE_BYTES, check_divides, check_parallel_sizes, spec_fields
from megatron_balance.model.kinds import Experts, LatentAttention, LayerKind, Mamba, Recompute


@dataclass(frozen=True)
class ModelSpec:
    """A GPT or hybrid model of Megatron's, in Megatron's words.

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
        attention_output_gate: a gate as wide as the queries scales what attention puts out.
        latent_attention: attention is multi-latent (MLA), in place of ``num_query_groups`` and ``kv_channels``.
        untied_head: embedding and output layer have weights of their own.
        mtp_num_layers: multi-token-prediction (MTP) depths.
        mtp_layers: kinds of the layers of one depth; empty is one of the kind of the last layer.
        experts: the mixture of experts of those ``layers`` that have one.
        mamba: the Mamba-2 part of those ``layers`` that have one.
        dtype: parameters and activations: ``fp32``, ``bf16`` or ``fp16``.
        matmul_dtype: matrix products inside the layers: ``dtype``, ``fp8`` or ``fp4``.
        main_gradient_bytes: width of a value in the buffer in which gradients of micro-batches add up.
        gradient_accumulation_fusion: weight gradients are added to that buffer inside their matrix product.
        fused_kernels: Transformer Engine's layers (attention that skips the masked half and never writes its scores),
            not Megatron's local ones.
        cross_entropy_fusion: None, ``native`` or ``te``.
        sequence_parallel: norms and residuals are split over the tensor-parallel ranks.
        recompute: what is computed again in the backward pass.
        hidden_dropout, attention_dropout: probabilities; above 0 their masks are kept.
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
    attention_output_gate: bool = False
    latent_attention: LatentAttention | None = None
    untied_head: bool = False
    mtp_num_layers: int = 0
    mtp_layers: tuple[LayerKind, ...] = ()
    experts: Experts | None = None
    mamba: Mamba | None = None
    dtype: str = "fp32"
    matmul_dtype: str = "fp32"
    main_gradient_bytes: int = 4
    gradient_accumulation_fusion: bool = True
    fused_kernels: bool = True
    cross_entropy_fusion: str | None = None
    sequence_parallel: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not self.layers:
            raise BalanceError("num_layers is 0: a pipeline split needs --num-layers 1 or more")
        for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
                     "padded_vocab_size", "seq_length"):  # fmt: skip
            if getattr(self, name) < 1:
                raise BalanceError(f"{name} must be at least 1, not {getattr(self, name)}")
        check_divides(self.num_query_groups, "num_query_groups", self.num_attention_heads, "num_attention_heads")
        if self.experts is None and any(layer.moe for layer in (*self.layers, *self.mtp_layers)):
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
        values = spec_fields(arguments)
        spec = cls(**values)
        check_parallel_sizes(values, arguments)
        return spec

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def depth_layers(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers of one multi-token-prediction depth; none without any depth."""
        return (self.mtp_layers or self.layers[-1:]) if self.mtp_num_layers else ()

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
        kinds = {"layers": _describe(self.layers), "mtp_layers": _describe(self.mtp_layers)}
        return {**kinds, **_flatten(self, skip=kinds)}


def _describe(layers: tuple[LayerKind, ...]) -> str:
    """Runs of equal layers: ``3 dense, 58 moe``."""
    return ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(layers))


def _flatten(value: Any, prefix: str = "", skip: Container[str] = ()) -> dict[str, int | str | bool | float | None]:
    flat: dict[str, int | str | bool | float | None] = {}
    for name in (each.name for each in fields(value) if each.name not in skip):
        entry = getattr(value, name)
        if is_dataclass(entry):
            flat |= _flatten(entry, prefix=f"{prefix}{name}_")
        else:
            flat[prefix + name] = " ".join(entry) if isinstance(entry, tuple) else entry
    return flat
