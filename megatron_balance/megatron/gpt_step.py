"""Batch, loss and forward step of our `pretrain_gpt`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_balance.megatron.gpt_data import carries_lengths, has_mtp

_KEYS = (
    "tokens labels loss_mask attention_mask position_ids"
    " cu_seqlens cu_seqlens_padded max_seqlen local_cp_size hybrid_cp_group"
).split()
_SPIKE = 10  # a loss this many times the largest seen counts as spiky, as in Megatron's own script

_straggler_timer = StragglerDetector()


# Keywords that not every version has; all others must be there.
_VERSIONED = frozenset({"is_sft", "has_cu_seqlens", "use_per_sequence_balancing", "tokens_per_sample"})


@lru_cache
def _left_out(function: Any) -> frozenset[str]:
    return _VERSIONED - set(inspect.signature(function).parameters)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` without those of `_VERSIONED` that this Megatron's version of it does not take."""
    left_out = _left_out(function)
    return function(*args, **{name: value for name, value in kwargs.items() if name not in left_out})


def get_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> dict[str, Any]:
    """The next micro-batch on this rank: each of `_KEYS`, None where this stage does not need it."""
    args = get_args()
    batch = dict.fromkeys(_KEYS)
    mtp, with_lengths = has_mtp(args, vp_stage), carries_lengths(args)
    reads_tokens = is_first_or_last_pipeline_stage(vp_stage) or mtp
    if not reads_tokens and not with_lengths:
        return batch
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        item = next(data_iterator)
        batch = {key: value.cuda(non_blocking=True) if (value := item.get(key)) is not None else None for key in _KEYS}
    batch = _call(
        core_utils.get_batch_on_this_tp_rank,
        batch,
        is_sft=with_lengths,  # 0.18's name of the next
        has_cu_seqlens=with_lengths,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if hasattr(core_utils, "flatten_batch_for_packed_sequences"):  # since 0.19
        batch = core_utils.flatten_batch_for_packed_sequences(batch)
    if not reads_tokens:
        lengths = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        return dict.fromkeys(_KEYS) | {key: batch[key] for key in lengths}
    return _call(
        core_utils.get_batch_on_this_cp_rank,
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=with_lengths and not args.sft,
    )


def _packed_sequences(batch: dict[str, Any]) -> PackedSeqParams | None:
    if batch["cu_seqlens"] is None:
        return None
    real = batch["cu_seqlens"].squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(real)
    bounds = real if padded is None else padded  # Transformer Engine takes the padded bounds for both
    longest = int(batch["max_seqlen"].item())
    return _call(
        PackedSeqParams,
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if batch["local_cp_size"] is None else int(batch["local_cp_size"].item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )


@lru_cache(maxsize=1)
def _distillation_loss(*settings: Any) -> Any:
    from megatron.training.distillation import LossFuncCallable

    names = (
        "logprobs_dir", "decode_threads", "prefetch_factor", "msc_prefetch_depth", "kd_loss_alpha", "ignore_errors"
    )  # fmt: skip
    return LossFuncCallable(**dict(zip(names, settings, strict=True)))


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Masked sum of the per-token losses.

    Returns:
        The sum, the number of tokens that count, and both as the report ``{"lm loss": [sum, tokens]}``.
    """
    args = get_args()
    if getattr(args, "logits_load_dir", None) is not None:  # distillation from stored logits, since 0.19
        names = "dir decode_threads prefetch_factor msc_prefetch_depth kd_loss_alpha ignore_errors".split()
        distillation = _distillation_loss(*(getattr(args, f"logits_load_{name}") for name in names))
        loss, tokens, report = distillation(loss_mask, output, model=model)
    else:
        mask = loss_mask.view(-1).float()
        loss = torch.sum(output.view(-1).float() * mask)
        tokens = mask.sum().detach().to(torch.int)
        report = {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
    _check(loss, args)
    return loss, tokens, report


def _check(loss: torch.Tensor, args: Any) -> None:
    """Let Megatron's rerun machine judge the loss before it is reduced over ranks."""
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, word in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {word} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One micro-batch through this stage: its output and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        packed = _packed_sequences(batch)
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with _straggler_timer:
        if return_schedule_plan:  # --overlap-moe-expert-parallel-comm
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=packed)
    return output, partial(loss_func, batch["loss_mask"], model=model)
