"""The forward step of a packed micro-batch, in place of the training script's own; its `loss_func` stays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers

from megatron_balance.megatron.packed.context import own_places
from megatron_balance.megatron.packed.copies import to_device
from megatron_balance.megatron.packed.experts import padding_of
from megatron_balance.megatron.packed.items import LABELS, POSITIONS, TOKENS, VALID
from megatron_balance.megatron.packed.stages import reads_tokens
from megatron_balance.megatron.packed.totals import told

Loss = Callable[..., Any]
_straggler_timer = StragglerDetector()  # one for the process, of --log-straggler


@dataclass(frozen=True)
class Batch:
    """One micro-batch: its bins one behind the other in a single row of ``micro_batch_size * seq_length`` tokens.

    Attributes:
        tokens, labels: int64 of shape [1, row]; None on stages that read none.
        loss_mask: float32 of shape [1, row], 1 where a label counts.
        positions: int64 of shape [1, row], from 0 in each sequence.
        valid: float32 of shape [1, row] on the CPU, 0 at padding.
        packed: bounds of the sequences, for attention.

    With context parallelism the tensors hold a rank's own tokens, the bounds are of the whole row.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    positions: torch.Tensor
    valid: torch.Tensor
    packed: PackedSeqParams


def forward_step_with(loss_func: Loss) -> Callable[..., Any]:
    """A forward step for Megatron's schedules that ends in the script's ``loss_func(loss_mask, output[, model=])``."""
    takes_model = "model" in inspect.signature(loss_func).parameters

    def forward_step(data_iterator: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with _straggler_timer(bdata=True):
            batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        timers("batch-generator").stop()
        with _straggler_timer:
            output = model(
                batch.tokens,
                batch.positions,
                None,
                labels=batch.labels,
                packed_seq_params=batch.packed,
                **_mask(batch),
                **padding_of(get_args(), model, batch.valid, batch.packed.real_tokens),
            )
        extra = {"model": model} if takes_model else {}
        return output, partial(loss_func, batch.loss_mask, **extra)

    return forward_step


def next_batch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> Batch:
    """The next micro-batch on this rank.

    Every rank has an iterator and so knows the bounds; tokens are read on one tensor-parallel rank and broadcast to the others.
    """
    item = next(data_iterator)
    told.note(item)
    packed = _packed(item[POSITIONS].reshape(1, -1))
    packed.real_tokens = int(item[VALID].sum())  # for the recorder and for routers: bounds are of padding, too
    item = _own(item, packed)
    positions, valid = (item[name].reshape(1, -1) for name in (POSITIONS, VALID))
    tokens = labels = loss_mask = None
    if reads_tokens(get_args(), vp_stage):
        tokens, labels = _read(item, positions)
        loss_mask = to_device(valid).masked_fill(labels < 0, 0.0)
        labels = labels.clamp(min=0)
        if get_args().eod_mask_loss:
            loss_mask = loss_mask.masked_fill(tokens == _eod(), 0.0)
    return Batch(tokens, labels, loss_mask, to_device(positions), valid, packed)


def _own(item: dict[str, torch.Tensor], packed: PackedSeqParams) -> dict[str, torch.Tensor]:
    """Of an item the tokens that this context-parallel rank has."""
    places = own_places(packed.lengths)
    if places is None:
        return item
    return {name: item[name].reshape(-1)[places] for name in (TOKENS, LABELS, POSITIONS, VALID) if name in item}


def _read(item: dict[str, torch.Tensor], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, from the loader on the first tensor-parallel rank."""
    if mpu.get_tensor_model_parallel_rank() == 0:
        both = to_device(torch.stack((item[TOKENS].reshape(1, -1), item[LABELS].reshape(1, -1))))
    else:
        both = torch.empty((2, *positions.shape), dtype=torch.int64, device=torch.cuda.current_device())
    if mpu.get_tensor_model_parallel_world_size() > 1:
        dist.broadcast(both, mpu.get_tensor_model_parallel_src_rank(), group=mpu.get_tensor_model_parallel_group())
    return both[0], both[1]


def _packed(positions: torch.Tensor) -> PackedSeqParams:
    """Bounds of the sequences, read off the positions while they are still on the CPU: a GPU need not be waited for."""
    starts = (positions[0] == 0).nonzero()[:, 0]
    bounds = torch.cat((starts, starts.new_tensor([positions.numel()]))).to(torch.int32)
    lengths = bounds.diff()
    longest = int(lengths.max())
    on_device = to_device(bounds)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **_known(tokens_per_sample=positions.numel(), pad_between_seqs=False),
    )
    if "seq_idx" in _fields():  # for Mamba layers; Megatron's own way to it waits for the GPU
        numbers = torch.arange(lengths.numel(), dtype=torch.int32).repeat_interleave(lengths)
        packed.seq_idx = to_device(numbers[None])
    if mpu.get_context_parallel_world_size() > 1:  # the padding of a sequence counts as a part of it, but has no label
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = on_device
    packed.lengths = lengths.tolist()
    return packed


def _known(**values: Any) -> dict[str, Any]:
    """Those that this version's parameters have."""
    return {name: value for name, value in values.items() if name in _fields()}


@cache
def _fields() -> frozenset[str]:
    return frozenset(field.name for field in fields(PackedSeqParams))


def _mask(batch: Batch) -> dict[str, torch.Tensor | None]:
    """Multi-token prediction needs to know which labels count."""
    return {"loss_mask": batch.loss_mask} if get_args().mtp_num_layers else {}


@cache
def _eod() -> int:
    from megatron.training import get_tokenizer

    return get_tokenizer().eod
