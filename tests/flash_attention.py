"""flash-attn's function for sequences of different lengths, with the arguments of its release 2.8, computed by torch on the CPU."""

from __future__ import annotations

import torch

asked_deterministic: set[bool] = set()  # of the calls so far


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape [tokens, heads, head size], of queries in that shape; a window holds so many tokens before and behind, -1 for all."""
    assert causal and dropout_p == 0 and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    asked_deterministic.add(deterministic)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    attended = []
    for first, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        logits = torch.einsum("qhd,khd->hqk", q[first:end], k[first:end]) * (softmax_scale or q.size(2) ** -0.5)
        place = torch.arange(end - first)
        behind = place[:, None] - place[None, :]
        seen = (behind >= 0) & (behind <= window_size[0] if window_size[0] >= 0 else True)
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        attended.append(torch.einsum("hqk,khd->qhd", weights, v[first:end]))
    return torch.cat(attended)
