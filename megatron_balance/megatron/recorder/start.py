"""Putting the recorder into a job."""

from __future__ import annotations

import atexit
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance import cpu
from megatron_balance.costs.table import shapes_of
from megatron_balance.diagnosis.trace import EMBEDDING
from megatron_balance.errors import BalanceError
from megatron_balance.megatron import agreement
from megatron_balance.megatron.arguments import topology_of
from megatron_balance.megatron.chunks import contents
from megatron_balance.megatron.measuring.software import version
from megatron_balance.megatron.packed.chosen_shapes import more_of
from megatron_balance.megatron.recorder import hooks
from megatron_balance.megatron.recorder.common_clock import CommonClock
from megatron_balance.megatron.recorder.live import Live
from megatron_balance.megatron.recorder.marks import DeviceMarks, ProcessMarks
from megatron_balance.megatron.recorder.options import TraceOptions, prepare_folder, refuse_conflicts
from megatron_balance.megatron.recorder.parts import Parts
from megatron_balance.megatron.recorder.recorder import Recorder, recording
from megatron_balance.model import ModelSpec
from megatron_balance.reading import Scalar
from megatron_balance.reporting import global_rank
from megatron_balance.topology import Topology

FORMAT = 1


def after_globals(args: Any, options: TraceOptions) -> None:
    """Have this rank record.

    Raises:
        BalanceError: it cannot; the message says what to do.
    """
    refuse_conflicts(args, options)
    while recording:  # before this process was restarted in place
        recording.pop().finish()
    agreement.decide_on_rank_0("trace folder", lambda: prepare_folder(options) or "ready")
    on_gpu = torch.cuda.is_available() and not cpu.is_installed()
    topology = topology_of(args, _microbatches(args))
    row_tokens = args.micro_batch_size * args.seq_length
    recorder = Recorder(options, topology, row_tokens, DeviceMarks() if on_gpu else ProcessMarks())
    recorder.start = _start
    hooks.apply(recorder)
    recording.append(recorder)
    atexit.register(recorder.finish)


def _microbatches(args: Any) -> int:
    """Micro-batches of a step, with those that packing adds to what Megatron counts."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    counted = get_num_microbatches()
    return counted + (more_of(counted, args) if getattr(args, "varlen_packing", False) else 0)


def _start(recorder: Recorder, model: Sequence[Any], optimizer: Any) -> None:
    """Before the first recorded step, when groups and model are there."""
    from megatron.core import mpu
    from megatron.training import get_args

    args = get_args()
    # A resumed job may be further in a ramp-up of its batch size than one that begins.
    recorder.topology = replace(recorder.topology, num_microbatches=_microbatches(args))
    store = dist.HashStore() if args.world_size == 1 else agreement.store()
    chunks = [contents(chunk) for chunk in model]
    dp_rank, stage = mpu.get_data_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    tp_rank, cp_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_context_parallel_rank()
    rank, world_size = global_rank(), args.world_size
    same = {"dp_rank": dp_rank, "stage": stage, "rank": rank, "tp_rank": tp_rank, "cp_rank": cp_rank}
    tied = not args.untie_embeddings_and_output_weights and args.pipeline_model_parallel_size > 1
    if not (tied and any(chunk["embedding"] or chunk["head"] for chunk in chunks)):
        recorder.idle = frozenset({EMBEDDING})  # nobody else has a copy
    recorder.clock = CommonClock(store, rank, world_size, recorder.marks.epoch_s)
    recorder.clock.synchronize()
    if dp_rank == tp_rank == cp_rank == 0:
        store.set(f"chunks/{stage}", json.dumps(chunks))
    told = agreement.said_by_all(store, [f"chunks/{other}" for other in range(recorder.topology.pipeline_size)])
    job = {
        "format": FORMAT,
        "in_turn": True,
        "sends_ahead": bool(getattr(args, "overlap_p2p_comm", False)),
        "name": getattr(args, "wandb_exp_name", "") or "training",
        "topology": asdict(recorder.topology),
        "world_size": world_size,
        "stages": [json.loads(text) for text in told],  # of each pipeline rank its chunks
        "versions": {name: version(name) for name in ("torch", "megatron-core", "megatron-balance")},
        "micro_batch_tokens": recorder.row_tokens,
        "shapes": _shapes(args, recorder.topology),
    }
    # What may differ between ranks is not of the job: files that describe different jobs are not read as one trace.
    uncertainty_s = recorder.clock.uncertainty_s
    here = {
        "device": torch.cuda.get_device_name(),
        "clock_uncertainty_s": uncertainty_s if isfinite(uncertainty_s) else None,
    }
    layers = [len(chunk["layers"]) for chunk in chunks]
    speaks = tp_rank == 0 and cp_rank == 0
    recorder.speak(Live(store, rank, world_size, (dp_rank, stage), layers, recorder.topology, speaks))
    # Behind what the others wait for: a rank whose pyarrow cannot be loaded ends its recording here.
    recorder.parts = Parts(recorder.options.folder, rank, same, job, here)
    hooks.listen_to_sequences(recorder, model)
    if stage == 0 < recorder.topology.pipeline_size - 1:
        hooks.listen_to_embedding(recorder, model)
    hooks.listen_to_optimizer(recorder, optimizer)


def _shapes(args: Any, topology: Topology) -> dict[str, Scalar]:
    """What costs of this model hold for; nothing where a plan does not know such models."""
    try:
        return shapes_of(ModelSpec.from_arguments(vars(args)), topology)
    except BalanceError:
        return {}
