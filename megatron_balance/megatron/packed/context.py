"""Context parallelism: which tokens of a packed row each of its ranks has, and torch's attention over all of them.

Every sequence is cut into ``2 * size`` equal parts, of which rank r has the parts r and ``2 * size - 1 - r``: with causal attention
all ranks then have as much to do. It is the order that Megatron's rotary embedding and Transformer Engine's attention expect of
packed ("thd") rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_balance.megatron.packed.copies import to_device
from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.registry import Hook


def places_of(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Places in a row of the tokens that a rank has, ascending.

    Args:
        lengths: of the row's sequences, multiples of ``2 * size``.
        size: context-parallel ranks.
        rank: among them.

    Returns:
        int64 of shape [row / size].
    """
    of_sequence = torch.tensor(lengths)
    starts = of_sequence.cumsum(0) - of_sequence
    within = torch.arange(int(of_sequence.sum())) - starts.repeat_interleave(of_sequence)
    part = within // (of_sequence // (2 * size)).repeat_interleave(of_sequence)
    return ((part == rank) | (part == 2 * size - 1 - rank)).nonzero()[:, 0]


def own_places(lengths: Sequence[int]) -> torch.Tensor | None:
    """`places_of` this rank; None without context parallelism."""
    size = mpu.get_context_parallel_world_size()
    return None if size == 1 else places_of(lengths, size, mpu.get_context_parallel_rank())


def whole(local: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The row that all context-parallel ranks have together, in order; its gradient goes back to those that have the tokens.

    Args:
        local: shape [row / size, ...], a rank's own.
        lengths: of the row's sequences.
    """
    size = mpu.get_context_parallel_world_size()
    if size == 1:
        return local
    gathered = gather_from_sequence_parallel_region(local.contiguous(), group=mpu.get_context_parallel_group())
    order = torch.cat([places_of(lengths, size, rank) for rank in range(size)])
    return gathered.index_select(0, to_device(order.argsort()))


def _allows_context_parallelism(construct: Callable[..., None]) -> Callable[..., None]:
    """Stock attention refuses it, as it has no keys but a rank's own; ours gathers them."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            construct(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    return init


LOCAL_ATTENTION = Hook(
    "megatron.core.transformer.dot_product_attention",
    "DotProductAttention.__init__",
    FLAG,
    "allows context parallelism",
    _allows_context_parallelism,
)
