"""A model's Hugging Face ``config.json`` in Megatron's words: its argument names with their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text
from megatron_balance.reading import DamageError, parse_object

_GREATEST = {"num_hidden_layers": 100_000, "num_nextn_predict_layers": 100_000}
_GREATEST_SIZE = 2**31
_WINDOWED = {"sliding_attention": 1, "full_attention": 0}


@dataclass(frozen=True)
class Config:
    """The values of a ``config.json``, checked where they are read."""

    values: Mapping[str, Any]

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of ``least`` or more; null is a missing one.

        Raises:
            DamageError: it is something else.
        """
        value = default if self.values.get(name) is None else self.values[name]
        most = _GREATEST.get(name, _GREATEST_SIZE)
        if type(value) is not int or not least <= value <= most:
            shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
            raise DamageError(f"has {name} {shown}, which must be a whole number from {least} to {most}")
        return value

    def optional_size(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.size(name)

    def is_set(self, name: str, default: bool = False) -> bool:
        value = default if self.values.get(name) is None else self.values[name]
        if not isinstance(value, bool):
            raise DamageError(f"has {name} {value!r}, which must be true or false")
        return value

    def by_layer(self, name: str) -> list[Any] | None:
        """A list with an entry for each layer; None where there is none."""
        values, layers = self.values.get(name), self.num_layers
        if values is not None and not (isinstance(values, list) and len(values) >= layers):
            raise DamageError(f"has {name} that is not a list of {layers} entries, one for each of num_hidden_layers")
        return None if values is None else values[:layers]

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers")


Part = Callable[[Config], dict[str, Any]]

_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class _Family:
    """Models of one type.

    Attributes:
        parts: read what is not the same in all types.
        fixed: arguments that all models of the type share.
        needed: keys without a default, beside those that all types need.
        tied: whether embedding and output layer share weights where the config does not say.
    """

    parts: tuple[Part, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ("intermediate_size",)
    tied: bool = False


def arguments_from_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Megatron's arguments for the model that ``config.json`` describes.

    What training decides is not in it: batch and parallel sizes, precision where the config names none, and the sequence
    length. A window of N tokens includes the query's own, so that N - 1 earlier keys are seen.

    Raises:
        BalanceError: the file cannot be read, its model type is unknown, or keys are missing or impossible.
    """
    name = f"the Hugging Face config {path}"
    try:
        return _arguments(Config(parse_object(read_text(path, name))))
    except DamageError as error:
        raise BalanceError(f"{name} {error}") from error


def _arguments(config: Config) -> dict[str, Any]:
    model_type = config.values.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise DamageError(
            f"has the model_type {model_type!r}: only {', '.join(sorted(_FAMILIES))} are known. Give the model as Megatron's"
            " flags instead"
        )
    missing = [key for key in (*_NEEDED, *family.needed) if config.values.get(key) is None]
    if missing:
        raise DamageError(f"lacks {', '.join(missing)}, which a {model_type} model needs")
    arguments = {**_decoder(config, family.tied), **family.fixed}
    for part in family.parts:
        arguments |= part(config)
    return arguments


# --- Parts that families share ----------------------------------------------------------------------------------------


def _decoder(config: Config, tied: bool) -> dict[str, Any]:
    """What all of these models have: attention with rotary positions, a gated MLP, RMSNorm, few biases or none."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    groups = config.size("num_key_value_heads", heads)
    _check_divides("num_attention_heads", heads, "num_key_value_heads", groups)
    if config.values.get("head_dim") is None:
        _check_divides("hidden_size", hidden, "num_attention_heads", heads)
    arguments: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": config.size("head_dim", hidden // heads),
        "vocab_size": config.size("vocab_size"),
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": config.is_set("mlp_bias"),
        "add_qkv_bias": config.is_set("attention_bias") or config.is_set("mlp_bias"),
        "untie_embeddings_and_output_weights": not config.is_set("tie_word_embeddings", tied),
        **_activation(config),
    }
    for ours, theirs in (("ffn_hidden_size", "intermediate_size"), ("max_position_embeddings",) * 2):
        if (size := config.optional_size(theirs)) is not None:
            arguments[ours] = size
    if (config.values.get("torch_dtype") or config.values.get("dtype")) == "bfloat16":
        arguments["bf16"] = True
    return arguments


def _check_divides(name: str, number: int, divisor_name: str, divisor: int) -> None:
    if number % divisor:
        raise DamageError(f"has {name} {number}, which {divisor_name} {divisor} does not divide")


def _activation(config: Config) -> dict[str, Any]:
    """The MLP is gated in all of them; Megatron has one flag for SiLU and one for a GELU."""
    name = str(config.values.get("hidden_activation") or config.values.get("hidden_act") or "silu")
    return {"quick_geglu": True} if "gelu" in name else {"swiglu": True}


def _window(config: Config, pattern: list[int] | None) -> dict[str, Any]:
    """Sliding-window attention in the layers that ``pattern`` marks, or all where it is None."""
    listed = config.by_layer("layer_types")
    if listed is not None:
        unknown = sorted({repr(kind) for kind in listed if not isinstance(kind, str) or kind not in _WINDOWED})
        if unknown:
            raise DamageError(f"has layer_types {', '.join(unknown)}: only {', '.join(_WINDOWED)} are known")
        pattern = [_WINDOWED[kind] for kind in listed]
    size = config.optional_size("sliding_window")
    if size is None or (pattern is not None and not any(pattern)):
        return {}
    arguments: dict[str, Any] = {"window_size": (size - 1, 0)}
    return arguments if pattern is None else {**arguments, "window_attn_skip_freq": pattern}


def _window_everywhere(config: Config) -> dict[str, Any]:
    return _window(config, None)


def _window_from_some_layer(config: Config) -> dict[str, Any]:
    """Qwen: only where ``use_sliding_window`` says so, and then from layer ``max_window_layers`` on."""
    if not config.is_set("use_sliding_window"):
        return {}
    first = config.size("max_window_layers", 28, least=0)
    return _window(config, [int(index >= first) for index in range(config.num_layers)])


def _window_but_every(default: int) -> Part:
    """All but every n-th layer."""

    def part(config: Config) -> dict[str, Any]:
        every = config.size("sliding_window_pattern", default)
        return _window(config, [int((index + 1) % every != 0) for index in range(config.num_layers)])

    return part


def _experts(config: Config, count: str, topk: str, width: str) -> dict[str, Any]:
    experts, visited = config.size(count), config.size(topk)
    if visited > experts:
        raise DamageError(f"has {topk} {visited}, more than {count} {experts}")
    return {"num_experts": experts, "moe_router_topk": visited, "moe_ffn_hidden_size": config.size(width)}


def _all_experts(config: Config) -> dict[str, Any]:
    """Mixtral, GPT-OSS: a mixture of experts in each layer, as wide as the MLP would be."""
    return _experts(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")


def _qwen_experts(config: Config) -> dict[str, Any]:
    """Each ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name."""
    step, dense = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise DamageError(f"has mlp_only_layers {dense!r}, which must be a list")
    sparse = [int(index not in dense and (index + 1) % step == 0) for index in range(config.num_layers)]
    return {**_experts(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size"), "moe_layer_freq": sparse}


def _qwen_shared_expert(config: Config) -> dict[str, Any]:
    shared = config.size("shared_expert_intermediate_size")
    return {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}


def _deepseek_experts(config: Config) -> dict[str, Any]:
    """From layer ``first_k_dense_replace`` on, each ``moe_layer_freq``-th."""
    first, every = config.size("first_k_dense_replace", 0, least=0), config.size("moe_layer_freq", 1)
    sparse = [int(index >= first and index % every == 0) for index in range(config.num_layers)]
    arguments = _experts(config, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    if shared := config.size("n_shared_experts", 0, least=0):
        arguments["moe_shared_expert_intermediate_size"] = shared * arguments["moe_ffn_hidden_size"]
    return {**arguments, "moe_layer_freq": sparse}


def _latent_attention(config: Config) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latent queries, keys and values
        "group_query_attention": False,
        "q_lora_rank": config.optional_size("q_lora_rank"),
        "kv_lora_rank": config.size("kv_lora_rank"),
        "qk_head_dim": config.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.size("qk_rope_head_dim"),
        "v_head_dim": config.size("v_head_dim"),
        "kv_channels": config.size("v_head_dim"),
    }


def _token_prediction(config: Config) -> dict[str, Any]:
    depths = config.size("num_nextn_predict_layers", 0, least=0)
    return {"mtp_num_layers": depths} if depths else {}


# --- The families -----------------------------------------------------------------------------------------------------

_QWEN_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_DEEPSEEK = (
    "intermediate_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_LOCAL_EXPERTS = ("intermediate_size", "num_local_experts", "num_experts_per_tok")

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family((_window_everywhere,)),
    "mixtral": _Family((_window_everywhere, _all_experts), needed=_LOCAL_EXPERTS),
    "qwen2": _Family((_window_from_some_layer,), {"add_qkv_bias": True}),
    "qwen2_moe": _Family(
        (_window_from_some_layer, _qwen_experts, _qwen_shared_expert),
        {"add_qkv_bias": True},
        ("intermediate_size", *_QWEN_EXPERTS, "shared_expert_intermediate_size"),
    ),
    "qwen3": _Family((_window_from_some_layer,), {"qk_layernorm": True}, ("intermediate_size", "head_dim")),
    "qwen3_moe": _Family(
        (_window_from_some_layer, _qwen_experts),
        {"qk_layernorm": True},
        ("intermediate_size", "head_dim", *_QWEN_EXPERTS),
    ),
    "gemma": _Family(needed=("intermediate_size", "head_dim"), tied=True),
    "gemma2": _Family((_window_but_every(2),), needed=("intermediate_size", "head_dim"), tied=True),
    "gemma3_text": _Family(
        (_window_but_every(6),), {"qk_layernorm": True}, ("intermediate_size", "head_dim"), tied=True
    ),
    "deepseek_v2": _Family((_deepseek_experts, _latent_attention), needed=_DEEPSEEK),
    "deepseek_v3": _Family((_deepseek_experts, _latent_attention, _token_prediction), needed=_DEEPSEEK),
    "gpt_oss": _Family(
        (_window_but_every(2), _all_experts),
        {"add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable"},
        (*_LOCAL_EXPERTS, "head_dim"),
    ),
}
