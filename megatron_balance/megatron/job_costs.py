"""The costs that a job is planned on: measured here, estimated, or from a file."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_balance import cpu
from megatron_balance.costs.analytic import analytic_costs
from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.devices import device_named
from megatron_balance.costs.table import CostTable, holds_for, load_costs
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.agreement import gather_on_rank_0
from megatron_balance.megatron.arguments import ANALYTIC, FLAG, PROFILE, Options
from megatron_balance.megatron.measuring.launch import MeasurementFailed, cache_file, cached, keep, measure
from megatron_balance.megatron.measuring.software import device_name, software
from megatron_balance.model import ModelSpec
from megatron_balance.reporting import say
from megatron_balance.topology import Topology

# Beside Megatron's model config, arguments that change how long an element takes.
_COUNTS = (
    "transformer_impl", "optimizer", "use_distributed_optimizer", "data_parallel_size", "clip_grad",
    "fp16_lm_cross_entropy", "world_size", "untie_embeddings_and_output_weights", "position_embedding_type",
)  # fmt: skip
# Fields of that config which say how many stages there are, not what an element of one is.
_SPLITS = ("num_layers", "pipeline", "virtual", "microbatch_group", "account_for")


def costs_of_job(args: Any, options: Options, model: ModelSpec, topology: Topology) -> ChainCosts:
    """The costs that `--balanced-pipeline-costs` asks for.

    Raises:
        BalanceError: the costs file cannot be used, or a measurement that was asked for failed.
    """
    if options.costs_kind == ANALYTIC:
        return _estimated(options, model, topology)
    if options.costs_kind != PROFILE:
        table = load_costs(options.costs)
        table.check_fits(holds_for(model, topology), f"the costs file {options.costs}")
        return table.chain(model, topology)
    try:
        return _measured(args, model, topology).chain(model, topology)
    except MeasurementFailed as failure:
        if options.costs == PROFILE:
            raise BalanceError(
                f"the costs could not be measured: {failure}. Plan on estimates with {FLAG}-costs {ANALYTIC}, or on a costs"
                " file"
            ) from failure
        say(f"megatron-balance: the costs could not be measured, so the plan stands on estimates: {failure}")
        return _estimated(options, model, topology)


def source_named(costs: str) -> str:
    """How the source of a plan's costs begins, for a value of `--balanced-pipeline-costs`."""
    return {PROFILE: "measured", ANALYTIC: "analytic"}.get(costs) or load_costs(costs).source


def say_devices() -> None:
    """Let rank 0 say so when the ranks have different devices: each stage's costs are taken to be rank 0's."""
    names = gather_on_rank_0("device", device_name())
    if len(set(names)) > 1:
        runs = [(name, [rank for rank, _ in run]) for name, run in groupby(enumerate(names), key=lambda pair: pair[1])]
        listed = "; ".join(f"{name} on ranks {ranks[0]} to {ranks[-1]}" for name, ranks in runs)
        say(f"megatron-balance: the ranks have different devices, planned as if all were rank 0's: {listed}")


def _estimated(options: Options, model: ModelSpec, topology: Topology) -> ChainCosts:
    import torch

    here = device_name() if torch.cuda.is_available() else "cpu"
    return analytic_costs(model, topology, options.device or device_named(here))


def _measured(args: Any, model: ModelSpec, topology: Topology) -> CostTable:
    """From the cache, or measured now and kept there."""
    shapes = holds_for(model, topology)
    file = cache_file(_key(args, shapes))
    if table := cached(file, shapes):
        say(f"megatron-balance: costs measured before, kept in {file}")
        return table
    say("megatron-balance: measuring what embedding, layers and head take, in a process of its own ...")
    began_s = time.monotonic()
    script = sys.argv[0] if Path(sys.argv[0]).is_file() else None
    table = measure(
        script,
        sys.argv[1:],
        device="cpu" if cpu.is_installed() else "cuda",
        world_size=args.world_size // args.pipeline_model_parallel_size,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
    )
    say(f"megatron-balance: measured in {time.monotonic() - began_s:.0f} s")
    try:
        table.check_fits(shapes, "what was measured")
    except BalanceError as error:
        raise MeasurementFailed(str(error)) from error
    try:
        keep(file, table)
    except BalanceError as error:
        say(f"megatron-balance: the costs are used but not kept for the next start: {error}")
    return table


def _key(args: Any, shapes: dict[str, Any]) -> dict[str, Any]:
    """All that a measurement depends on."""
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings = {name: value for name, value in settings.items() if not any(part in name for part in _SPLITS)}
    return {
        "shapes": shapes,
        "config": {name: value for name, value in settings.items() if _is_plain(value)},
        "arguments": {name: getattr(args, name, None) for name in _COUNTS},
        "script": sys.argv[0],
        "device": device_name(),
        "software": software(),
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
