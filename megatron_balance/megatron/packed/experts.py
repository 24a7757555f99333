"""Padding is kept out of what a router is trained by: load and z losses would count it with the tokens of documents.

With tensor or context parallelism its load then weighs as much as on one rank, which takes a repair of Megatron's count of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import get_attr_wrapped_model

from megatron_balance.megatron.packed.copies import to_device
from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.registry import Hook

_MODULE = "megatron.core.transformer.moe.moe_utils"


def padding_of(args: Any, model: Any, valid: torch.Tensor, real_tokens: int) -> dict[str, torch.Tensor]:
    """The argument that tells a model which places are padding, where it has experts whose router is trained by their load.

    Args:
        args: Megatron's.
        model: a stage, wrapped or not.
        valid: 0 where this context-parallel rank's places are padding, of shape [1, places].
        real_tokens: of the whole micro-batch: one without any has no load to divide by.

    Returns:
        Megatron's ``padding_mask``, True at padding; with sequence parallelism a tensor-parallel rank's own part, unless Megatron
        cuts it. Nothing where this Megatron cannot take it: before 0.16, with biases of experts (its shapes are wrong up to 0.19),
        with multi-token prediction (which shifts it by bounds of whole rows) and in CUDA graphs of a fused router.
    """
    if not real_tokens or not _counts_tokens(args):
        return {}
    stage = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if not _takes_padding(type(stage)):
        return {}
    padding = valid == 0
    if args.sequence_parallel and not (stage.pre_process and _cuts_padding(type(stage))):
        padding = padding.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)[mpu.get_tensor_model_parallel_rank()]
    return {"padding_mask": to_device(padding)}


def _counts_tokens(args: Any) -> bool:
    if not args.num_experts or args.mtp_num_layers or getattr(args, "moe_router_enable_expert_bias", False):
        return False
    if getattr(args, "moe_router_fusion", False) and getattr(args, "cuda_graph_impl", "none") not in (None, "none"):
        return False
    kinds = args.moe_router_load_balancing_type
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(kind.endswith("aux_loss") for kind in kinds) or bool(args.moe_z_loss_coeff)


@cache
def _takes_padding(model: type) -> bool:
    return "padding_mask" in inspect.signature(model.forward).parameters


@cache
def _cuts_padding(model: type) -> bool:
    """Whether a first stage takes its own part of whole rows: those of GPT models do, of hybrid ones not."""
    preprocess = getattr(model, "_preprocess", None)
    return preprocess is not None and "padding_mask" in inspect.signature(preprocess).parameters


def multiplies_counts() -> bool:
    """Whether this Megatron multiplies a rank's number of tokens by that of the ranks (0.19 and newer), so that `TOKENS` is needed.

    Older ones do not, which happens to be right for the number that they take for a rank's own.
    """
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    attach = getattr(TopKRouter, "attach_and_log_load_balancing_loss", None)
    if attach is None or not hasattr(moe_utils, "get_tokens_per_expert_and_token_count"):
        return False
    return "tp_cp_group.size()" in inspect.getsource(attach)


def _shared_out(count: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    """`get_tokens_per_expert_and_token_count` that says of a rank's tokens what it says without padding: an equal share of all.

    With padding it counts a rank's own tokens after the sum over ranks has been written over them: all ranks' tokens, by which the
    gradient of the load is scaled, and by the number of ranks once more. Really own ones would not do either, as padding is at the
    end of a row, so that one rank has more of it: each rank's part of the load is to be scaled alike.
    """
    signature = inspect.signature(count)

    def counted(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        per_expert, _, total = count(*args, **kwargs)
        return per_expert, total / signature.bind(*args, **kwargs).arguments["reduce_group"].size(), total

    return counted


TOKENS = Hook(
    _MODULE,
    "get_tokens_per_expert_and_token_count",
    f"{FLAG} with --num-experts",
    "scales the load's gradient alike on any number of ranks",
    _shared_out,
)
