"""Attention within the sequences of a packed micro-batch, where Transformer Engine is not there to compute it.

Stock `DotProductAttention`, the attention of Megatron's local layer specs, refuses packed sequences. It is replaced for these
alone by torch's own attention, one sequence after the other, or by flash-attn's kernel for all of them at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_balance.megatron.packed.backends import FLAG
from megatron_balance.megatron.packed.options import FLASH
from megatron_balance.megatron.registry import Hook


@functools.cache  # one hook, however often arguments are parsed in a process
def attention_hook(kind: str) -> Hook:
    """The hook that lets the local layer spec attend within sequences, with ``kind`` (``flash`` or ``torch``)."""
    attend = _flash if kind == FLASH else _one_by_one

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            self: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            if packed_seq_params is None:
                return forward(self, query, key, value, *args, **kwargs)
            with _random_state(self):
                return attend(self, query, key, value, packed_seq_params).flatten(1)

        return attention

    module = "megatron.core.transformer.dot_product_attention"
    return Hook(module, "DotProductAttention.forward", FLAG, "attends within each sequence", wrap)


def _one_by_one(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
    """Torch's attention for each sequence; with context parallelism of a rank's own queries to all keys, which are gathered.

    Args:
        query, key, value: shape [tokens, heads, head size]; fewer heads of keys and values with grouped queries.

    Returns:
        Shape [tokens, heads, value's head size].
    """
    from megatron_balance.megatron.packed.context import whole

    lengths = _lengths(packed)
    own = [length * query.size(0) // sum(lengths) for length in lengths]
    key, value = whole(key, lengths), whole(value, lengths)
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    parts = [
        _attend(module, *(each.transpose(0, 1).unsqueeze(0) for each in sequence))
        for sequence in zip(query.split(own), key.split(lengths), value.split(lengths), strict=True)
    ]
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence, shape [1, heads, tokens, head size]; fewer tokens of queries with context parallelism."""
    from megatron_balance.megatron.packed.context import own_places

    tokens, window = key.size(2), _window(module)
    mask, own = None, own_places([tokens])
    if own is not None or (window is not None and window < tokens):
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        mask = mask if window is None else mask.triu(1 - window)
        mask = mask if own is None else mask[own]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=_dropout(module),
        is_causal=mask is None,
        scale=_scale(module),
    )


def _flash(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
    """flash-attn's kernel for sequences of different lengths."""
    from flash_attn import flash_attn_varlen_func

    window = _window(module)
    return flash_attn_varlen_func(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        dropout_p=_dropout(module),
        softmax_scale=_scale(module),
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        deterministic=module.config.deterministic_mode,
    )


def _random_state(module: Any) -> contextlib.AbstractContextManager[None]:
    """Dropout draws as in stock attention: tensor-parallel ranks, which have other heads, each for themselves."""
    from megatron.core import tensor_parallel

    if module.config.sequence_parallel or not _dropout(module):
        return contextlib.nullcontext()
    return tensor_parallel.get_cuda_rng_tracker().fork()


def _dropout(module: Any) -> float:
    return module.attention_dropout.p if module.training else 0.0


def _window(module: Any) -> int | None:
    """Tokens that one looks at, itself among them; None where it looks at all before it."""
    size = getattr(module.scale_mask_softmax, "window_size", None)  # of this layer, where a model alternates
    return None if size is None else size[0] + 1


def _scale(module: Any) -> float:
    return module.softmax_scale * (module.scale_mask_softmax.scale or 1.0)  # the two parts of query-key layer scaling


def _lengths(packed: Any) -> list[int]:
    """Tokens of each sequence; kept with the bounds, as every layer asks, and a GPU would have to be waited for."""
    if (lengths := getattr(packed, "lengths", None)) is None:
        lengths = packed.cu_seqlens_q.diff().tolist()
        packed.lengths = lengths
    return lengths
