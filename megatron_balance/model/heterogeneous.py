"""Layers that each have a configuration of their own, in the format of Llama-Nemotron's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_balance import reading
from megatron_balance.errors import BalanceError
from megatron_balance.model.kinds import LayerKind

_MULTIPLE = 256  # to which Megatron rounds widths that are given by factor up


def block_kinds(
    text: str, num_attention_heads: int, hidden_size: int, num_query_groups: int, ffn_hidden_size: int
) -> tuple[LayerKind, ...]:
    """The kind of each layer that a configuration describes.

    Args:
        text: JSON with ``block_configs``, a list with an ``attention`` and an ``ffn`` (or ``mlp``) for each layer.
        num_attention_heads, hidden_size: of the model.
        num_query_groups, ffn_hidden_size: of the model; a layer that has the same has none of its own.

    Raises:
        BalanceError: the text is no such configuration; names the layer and the key.
    """
    try:
        blocks = reading.parse_object(text).get("block_configs")
        reading.checked(blocks, "block_configs", isinstance(blocks, list) and blocks != [], "a list of layers")
        return tuple(
            _kind(block, f"block_configs[{i}]", num_attention_heads, hidden_size, num_query_groups, ffn_hidden_size)
            for i, block in enumerate(blocks)
        )
    except reading.DamageError as damage:
        raise BalanceError(
            f"the heterogeneous layers configuration {damage}: give Megatron's --heterogeneous-layers-config-path a"
            " config.json with block_configs"
        ) from damage


def _kind(block: Any, key: str, heads: int, hidden: int, model_groups: int, model_ffn: int) -> LayerKind:
    reading.checked(block, key, isinstance(block, dict), "a mapping")
    attention = _part(block, key, "attention")
    mlp = _part(block, key, "ffn" if block.get("ffn") else "mlp")
    mixer, feed_forward = _what(attention, "attention"), _what(mlp, "mlp")
    groups = _groups(attention, f"{key}.attention", heads) if mixer == "attention" else None
    ffn = _ffn_hidden_size(mlp, f"{key}.ffn", hidden) if feed_forward == "mlp" else None
    return LayerKind(
        mixer=mixer,
        feed_forward=feed_forward,
        num_query_groups=groups if groups != model_groups else None,
        ffn_hidden_size=ffn if ffn != model_ffn else None,
    )


def _part(block: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    part = block.get(name)
    return reading.checked(part, f"{key}.{name}", isinstance(part, dict), "a mapping")


def _what(part: Mapping[str, Any], name: str) -> str | None:
    if part.get("no_op"):
        return None
    return "linear" if part.get("replace_with_linear") else name


def _groups(attention: Mapping[str, Any], key: str, heads: int) -> int | None:
    """Query groups, given or as query heads in each of them."""
    if "num_query_groups" in attention:
        groups = _size(attention, "num_query_groups", key)
        reading.checked(
            groups, f"{key}.num_query_groups", heads % (groups or 1) == 0, f"a divisor of {heads} attention heads"
        )
        return groups
    in_group = _size(attention, "n_heads_in_group", key)
    if in_group is None:
        return None
    reading.checked(in_group, f"{key}.n_heads_in_group", heads % in_group == 0, f"a divisor of {heads} attention heads")
    return heads // in_group


def _ffn_hidden_size(mlp: Mapping[str, Any], key: str, hidden: int) -> int | None:
    """A width, given or as a factor of two thirds of the hidden size, rounded up."""
    if "ffn_hidden_size" in mlp:
        return _size(mlp, "ffn_hidden_size", key)
    factor = mlp.get("ffn_mult")
    if factor is None:
        return None
    width = int(2 * reading.positive(factor, f"{key}.ffn_mult") * hidden / 3)
    return -(-width // _MULTIPLE) * _MULTIPLE


def _size(part: Mapping[str, Any], name: str, key: str) -> int | None:
    value = part.get(name)
    if value is None:
        return None
    return reading.checked(value, f"{key}.{name}", type(value) is int and value > 0, "a whole number of 1 or more")
