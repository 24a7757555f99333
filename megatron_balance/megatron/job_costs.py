"""The costs that a job is planned on: measured here, estimated, or from a file."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from dataclasses import fields, replace
from enum import Enum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from megatron_balance import cpu
from megatron_balance.costs.analytic import analytic_table
from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.devices import Device, device_named
from megatron_balance.costs.table import CostTable, save_costs, shapes_of
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.agreement import gather_on_rank_0
from megatron_balance.megatron.arguments import ANALYTIC, FLAG, PROFILE, Options
from megatron_balance.megatron.measuring.launch import MeasurementFailed, cache_file, cached, measure
from megatron_balance.megatron.measuring.software import device_name, software
from megatron_balance.model import ModelSpec
from megatron_balance.planning.costs import given_costs
from megatron_balance.reading import Scalar
from megatron_balance.reporting import say
from megatron_balance.topology import Topology

# Arguments beside Megatron's model config that change how long an element takes.
_ARGUMENTS = (
    "transformer_impl", "optimizer", "use_distributed_optimizer", "use_precision_aware_optimizer",
    "optimizer_cpu_offload", "main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "clip_grad", "fp16_lm_cross_entropy", "position_embedding_type", "create_attention_mask_in_dataloader",
    "varlen_packing", "varlen_packing_attention",
)  # fmt: skip
# Fields of that config that say how many layers and stages there are, or cannot matter to one rank.
_NOT_OF_AN_ELEMENT = {
    "num_layers", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_size", "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_vp_stage", "batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm", "pipeline_dtype",
    "variable_seq_lengths", "deallocate_pipeline_outputs", "config_logger_dir", "inference_sampling_seed",
}  # fmt: skip


def costs_of_job(args: Any, options: Options, model: ModelSpec, topology: Topology) -> ChainCosts:
    """The costs that `--balanced-pipeline-costs` asks for, with the attention of packed documents where they are packed.

    Raises:
        BalanceError: the costs file cannot be used, or a measurement that was asked for failed.
    """
    table = table_of_job(args, options, model, topology)
    if getattr(args, "varlen_packing", False):
        from megatron_balance.megatron.packed.data import attention_share

        share = attention_share(args)
        say(f"megatron-balance: attention within documents is {share:.1%} of that over whole sequences")
        table = table.with_attention(share)
    return table.chain(model, topology)


def table_of_job(args: Any, options: Options, model: ModelSpec, topology: Topology) -> CostTable:
    """The same by kind of element, of whole sequences."""
    if options.costs_kind == ANALYTIC:
        return _estimated(options, model, topology)
    if options.costs_kind != PROFILE:
        return given_costs(options.costs, model, topology)
    try:
        table = _measured(args, model, topology)
        table.chain(model, topology)  # fails here, where estimates can take its place
        return table
    except Exception as failure:  # whatever it is: no job may fail for want of measured costs
        known = isinstance(failure, MeasurementFailed | BalanceError)
        reason = str(failure) if known else f"{type(failure).__name__}: {failure}"
        if options.costs == PROFILE:
            raise BalanceError(
                f"the costs could not be measured: {reason}. Plan on estimates with {FLAG}-costs {ANALYTIC}, or on a costs file"
            ) from failure
        say(f"megatron-balance: the costs could not be measured, so the plan stands on estimates: {reason}")
        return _estimated(options, model, topology)


def say_devices() -> None:
    """Let rank 0 say so when the ranks have different devices: each stage's costs are taken to be rank 0's."""
    names = gather_on_rank_0("device", device_name())
    if len(set(names)) > 1:
        runs = [(name, [rank for rank, _ in run]) for name, run in groupby(enumerate(names), key=itemgetter(1))]
        listed = "; ".join(f"{name} on {_span(ranks)}" for name, ranks in runs)
        say(f"megatron-balance: the ranks have different devices, planned as if all were rank 0's: {listed}")


def _span(ranks: list[int]) -> str:
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def device_of_job(options: Options) -> Device:
    """The device asked for, or the one here, with the memory that it really has."""
    return device_here() if options.device is None else options.device


def device_here() -> Device:
    """The device of this process, with the memory that it really has."""
    if not torch.cuda.is_available():
        return device_named("cpu")
    return replace(device_named(device_name()), memory_bytes=float(torch.cuda.get_device_properties().total_memory))


def _estimated(options: Options, model: ModelSpec, topology: Topology) -> CostTable:
    return analytic_table(model, topology, device_of_job(options))


def _measured(args: Any, model: ModelSpec, topology: Topology) -> CostTable:
    """From the cache, or measured now and kept there."""
    shapes, script = shapes_of(model, topology), _script()
    file = cache_file(_key(args, model, shapes, script))
    if table := cached(file, shapes):
        say(f"megatron-balance: costs measured before, kept in {file}")
        return table
    say("megatron-balance: measuring what embedding, layers and head take, in a process of its own ...")
    began_s = time.monotonic()
    table = measure(
        script,
        sys.argv[1:],
        device="cpu" if cpu.is_installed() else "cuda",
        world_size=args.world_size // args.pipeline_model_parallel_size,
    )
    say(f"megatron-balance: measured in {time.monotonic() - began_s:.0f} s")
    table.check_fits(shapes, "what was measured")
    try:
        save_costs(file, table)
    except BalanceError as error:
        say(f"megatron-balance: the costs are used but not kept for the next start: {error}")
    return table


def _script() -> str | None:
    """The training script of this job; None for our own."""
    path = Path(sys.argv[0]).resolve()
    own = importlib.util.find_spec("megatron_balance.megatron.pretrain_gpt").origin
    if path == Path(own).resolve():
        return None
    if not path.is_file():
        raise MeasurementFailed(f"the training script {sys.argv[0]} is no file that a second process could run")
    return str(path)


def _key(args: Any, model: ModelSpec, shapes: dict[str, Scalar], script: str | None) -> dict[str, Any]:
    """All that a measurement depends on, as JSON can hold it."""
    import megatron.core
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    fields_of_element = {field.name for field in fields(config)} - _NOT_OF_AN_ELEMENT
    shards = args.data_parallel_size if args.use_distributed_optimizer else 1
    return {
        "shapes": shapes,
        "kinds": sorted({str(kind) for kind in model.layers}),
        "config": {name: _described(getattr(config, name)) for name in sorted(fields_of_element)},
        "arguments": {name: _described(getattr(args, name, None)) for name in _ARGUMENTS},
        "optimizer_shards": shards,
        "script": script and [script, hashlib.sha256(Path(script).read_bytes()).hexdigest()],
        "megatron": str(Path(megatron.core.__file__).parent),
        "device": device_name(),
        "software": software(),
    }


def _described(value: Any) -> Any:
    """A setting as JSON can hold it; None for objects without a lasting name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    return getattr(value, "__qualname__", None)
