"""`--balanced-pipeline`: a cost-weighted layout in place of Megatron's uniform one.

In two phases, because Megatron fixes the number of virtual stages while it validates its arguments, and knows vocabulary and
batch only after that: `before_validation` writes a provisional split with the right number of stages, `after_globals` the
planned one. Megatron builds its model from the arguments later still.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from megatron_balance.command_line.derived import check_expert_ranks, check_stages_beside_fsdp, check_weight_shards
from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.transfer import transfer_s
from megatron_balance.errors import BalanceError, MemoryLack
from megatron_balance.megatron import stored_layout
from megatron_balance.megatron.agreement import decide_on_rank_0
from megatron_balance.megatron.arguments import ANALYTIC, FLAG, LAST, PROFILE, Options, topology_of
from megatron_balance.megatron.job_costs import costs_of_job, device_of_job, say_devices
from megatron_balance.megatron.microbatches import counts_of
from megatron_balance.megatron.registry import Hook, registry
from megatron_balance.megatron.split_arguments import (
    argument_of,
    is_ours,
    mtp_stages,
    num_layers,
    pattern_of,
    refuse_given_split,
    split_flag,
    takes_mtp,
    write_split,
)
from megatron_balance.model import ModelSpec, refuse_uncovered
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.chain import check_stages
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.pipeline.plan import Plan, Scalar, find_plan, save_plan
from megatron_balance.pipeline.show import render_plan
from megatron_balance.planning.costs import fingerprint
from megatron_balance.planning.planner import plan_job
from megatron_balance.reporting import say
from megatron_balance.topology import Topology, virtual_size_of

# --- before validation ------------------------------------------------------------------------------------------------


def before_validation(args: Any, options: Options) -> None:
    """Check our options against Megatron's and write the provisional split into ``args``.

    Raises:
        BalanceError: options that exclude each other, or more stages than the model has elements.
    """
    if is_ours(args):
        return
    if args.pipeline_model_parallel_size == 1:
        dry = options.dry_run is not None
        outcome = "there is nothing to plan" if dry else "training as stock"
        say(f"megatron-balance: {FLAG} has nothing to do: --pipeline-model-parallel-size is 1; {outcome}")
        if dry:
            sys.exit(0)
        return
    _refuse_conflicts(args)
    if options.dry_run is not None:
        _pretend_world_size(args, options.dry_run)
    virtual_size = _virtual_size(args)
    stock.refuse_virtual_stages_of_blocks(vars(args), virtual_size)
    args.num_layers_per_virtual_pipeline_stage = None
    args.num_virtual_stages_per_pipeline_rank = None
    registry.apply(PRINT_ARGS)
    write_split(args, _provisional(args, virtual_size))


def _refuse_conflicts(args: Any) -> None:
    refuse_uncovered(vars(args))
    check_weight_shards(vars(args))
    check_stages_beside_fsdp(vars(args))
    refuse_given_split(args)
    for name, value in (
        ("decoder-first-pipeline-num-layers", args.decoder_first_pipeline_num_layers),
        ("decoder-last-pipeline-num-layers", args.decoder_last_pipeline_num_layers),
        ("account-for-embedding-in-pipeline-split", args.account_for_embedding_in_pipeline_split or None),
        ("account-for-loss-in-pipeline-split", args.account_for_loss_in_pipeline_split or None),
    ):
        if value is not None:
            raise BalanceError(
                f"{FLAG} decides how many layers each stage gets: leave out --{name}"
                + (f" {value}" if value is not True else "")
            )
    if getattr(args, "export_kd_teacher_load", None) is not None:
        raise BalanceError(
            f"{FLAG} plans for the student alone, and Megatron would split the teacher of --export-kd-teacher-load by the same"
            " layout: leave one of the two out, or give a split by hand with --pipeline-model-parallel-layout"
        )
    if getattr(args, "use_legacy_models", False):
        raise BalanceError(f"{FLAG} cannot split legacy models: leave out --use-legacy-models or {FLAG}")
    if args.num_layers_per_virtual_pipeline_stage and args.num_virtual_stages_per_pipeline_rank:
        raise BalanceError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank both give the number of"
            " virtual stages: leave one out"
        )
    if args.mtp_num_layers and pattern_of(args) is None and not takes_mtp():
        raise BalanceError(
            f"this Megatron has no place for multi-token prediction in a layout (0.13): leave --mtp-num-layers or {FLAG} out, or"
            " update Megatron"
        )
    if args.num_layers is None and pattern_of(args) is None:
        raise BalanceError(f"{FLAG} needs --num-layers")
    for name in (
        "num_layers",
        "tensor_model_parallel_size",
        "context_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    ):
        if (size := getattr(args, name)) is not None and size < 1:
            raise BalanceError(f"--{name.replace('_', '-')} {size}: give 1 or more")


def _pretend_world_size(args: Any, world_size: int) -> None:
    if args.world_size != 1:
        raise BalanceError(
            f"{FLAG}-dry-run plans in a single process, but there are {args.world_size}: start it without torchrun and"
            f" give the number of processes, {FLAG}-dry-run {args.world_size}"
        )
    replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % replica:
        raise BalanceError(
            f"{FLAG}-dry-run {world_size}: tensor, pipeline and context parallel sizes need a multiple of"
            f" {args.tensor_model_parallel_size} * {args.pipeline_model_parallel_size} * {args.context_parallel_size}"
            f" = {replica} processes"
        )
    if world_size:
        check_expert_ranks(vars(args), world_size)
    args.world_size = world_size or replica
    args.tensorboard_dir, args.wandb_project = None, ""  # a dry run leaves no record


def _virtual_size(args: Any) -> int:
    """Virtual stages on each pipeline rank, from either of Megatron's two flags."""
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if per_stage is None:
        return 1
    layers = num_layers(args)
    size = virtual_size_of(layers, args.pipeline_model_parallel_size, per_stage)
    say(
        f"megatron-balance: --num-layers-per-virtual-pipeline-stage {per_stage} makes {size} virtual stage(s) a rank:"
        f" {layers} layers / ({args.pipeline_model_parallel_size} ranks * {per_stage}), rounded"
    )
    return size


def _provisional(args: Any, virtual_size: int) -> Layout:
    """A split into the right number of stages, layers spread evenly."""
    stages, layers = args.pipeline_model_parallel_size * virtual_size, num_layers(args)
    check_stages(layers, stages)  # refuses more stages than elements
    bounds = [layers * stage // stages for stage in range(stages + 1)]
    return Layout.of([end - start for start, end in pairwise(bounds)], args.mtp_num_layers or 0)


# --- after the global variables ---------------------------------------------------------------------------------------


def after_globals(args: Any, options: Options) -> None:
    """Write the layout into ``args`` on every rank: the checkpoint's that is resumed, else a planned one; show it.

    Raises:
        BalanceError: the model cannot be planned, or the plan file is of another job.
        SystemExit: the end of a dry run.
    """
    if not is_ours(args):  # one pipeline stage
        stored_layout.check_without_flag(args)
        registry.apply(stored_layout.SAVE)
        return
    text, plan = stored_layout.layout_to_keep(args, options), None
    if text is None:
        plan = _agreed_plan(args, options)
        text = plan.layout
    layout = parse_layout(text)
    write_split(args, layout)
    _update_wandb(args)
    registry.undo(PRINT_ARGS)
    if options.dry_run is None:
        print_deferred_arguments()
    if plan is not None:
        say(render_plan(plan))
        say(f"\n{split_flag(args, layout)}")
    if options.dry_run is not None:
        sys.exit(0)
    registry.apply(stored_layout.SAVE)


def _agreed_plan(args: Any, options: Options) -> Plan:
    """Rank 0's plan, checked to be for the job that this rank was started for."""
    model, topology = ModelSpec.from_arguments(vars(args)), _topology(args)
    holds_for = {**model.fingerprint, **_given(options)}
    if getattr(args, "varlen_packing", False):
        holds_for["varlen_packing"] = True
    if options.costs_kind == PROFILE:
        say_devices()
    plan = Plan.from_json(
        decide_on_rank_0("plan", lambda: _decide(args, options, model, topology, holds_for).to_json())
    )
    plan.check_fits(holds_for, topology, "rank 0's plan", "start all ranks with the same command line")
    return plan


def _given(options: Options) -> dict[str, str]:
    """Costs and wishes on the command line: part of what a stored plan was made for."""
    weights = {"embedding_weight": options.embedding_weight, "head_weight": options.head_weight}
    given = {name: f"{weight[0]:g},{weight[1]:g}" for name, weight in weights.items() if weight is not None}
    if options.costs_kind not in (PROFILE, ANALYTIC):
        given["costs_file"] = fingerprint(options.costs)
    if options.mtp_placement == LAST:
        given["mtp_placement"] = LAST
    if options.memory.gigabytes is not None:
        given["memory_gb"] = f"{options.memory.gigabytes:g}"
    if options.memory.like is not None:
        given["memory_like"] = options.memory.like
    return given


def _decide(args: Any, options: Options, model: ModelSpec, topology: Topology, holds_for: Mapping[str, Scalar]) -> Plan:
    """The stored plan where there is one, else a new one, stored where asked for."""
    path = options.plan_file
    plan = None if path is None else find_plan(path)
    if plan is not None:
        _check_costs(options, plan, path)  # first: another device may differ in more than its name
        plan.check_fits(holds_for, topology, f"the plan file {path}")
        say(f"megatron-balance: plan read from {path}")
        return plan
    costs = costs_of_job(args, options, model, topology)
    costs = costs.with_weights(options.embedding_weight, options.head_weight)
    say(f"megatron-balance: planning {topology.num_stages} stages on costs {costs.source} ...")
    plan = _plan_within_memory(args, options, model, topology, costs, holds_for)
    if path is not None:
        save_plan(path, plan)
        say(f"megatron-balance: plan written to {path}")
    return plan


def _plan_within_memory(
    args: Any,
    options: Options,
    model: ModelSpec,
    topology: Topology,
    costs: ChainCosts,
    holds_for: Mapping[str, Scalar],
) -> Plan:
    """A plan that fits the memory asked for, or by the estimate the device's, which does not keep a job from starting."""
    device = device_of_job(options)
    make = functools.partial(
        plan_job,
        costs,
        model,
        topology,
        vars(args),
        holds_for,
        wish=options.memory,
        mtp_stages=mtp_stages(args, options, topology),
        allow_empty=stock.may_leave_empty(topology, by_pattern=pattern_of(args) is not None),
        p2p_s=transfer_s(model, topology, device),
        say=lambda text: say(f"megatron-balance: {text}"),
        sharpens_bound=False,  # a job waits for its split, not for the proof of it, which `megatron-balance plan` gives
    )
    if options.memory.is_given:
        return make().plan
    try:
        return make(device=device).plan
    except MemoryLack as lack:
        say(f"megatron-balance: planning without a limit of memory, as the estimate leaves no split: {lack}")
        return make().plan


def _check_costs(options: Options, plan: Plan, path: str) -> None:
    """A plan made elsewhere for the job's device is welcome; one on other costs than the flags name is not."""
    if options.device is not None:
        asked, wanted = f"{FLAG}-device {options.device.name}", f"analytic ({options.device.name})"
    elif options.costs in (PROFILE, ANALYTIC):
        asked, wanted = f"{FLAG}-costs {options.costs}", "measured" if options.costs == PROFILE else "analytic"
    else:
        return
    if not plan.costs_source.startswith(wanted):
        raise BalanceError(
            f"the plan file {path} stands on other costs, {plan.costs_source}, than {asked} asks for; delete it to plan"
            " afresh, or leave the flag out"
        )


def _num_microbatches(args: Any) -> int:
    """Micro-batches of a step, of the largest global batch where it grows."""
    counts = counts_of(args)
    if len(counts) > 1:
        say(
            f"megatron-balance: planning for the largest global batch, {counts[-1]} micro-batches (the smallest has {counts[0]})"
        )
    return counts[-1]


def _topology(args: Any) -> Topology:
    return topology_of(args, _num_microbatches(args))


def _update_wandb(args: Any) -> None:
    from megatron.training import global_vars

    if (wandb := global_vars.get_wandb_writer()) is not None:
        name = argument_of(args)
        wandb.config.update({name: getattr(args, name)}, allow_val_change=True)


# --- Megatron's table of arguments ------------------------------------------------------------------------------------

_deferred: list[Any] = []


def _defer(print_args: Any) -> Any:
    """Megatron prints its arguments at the end of validation, when the layout is not final: keep that until it is."""

    def later(*args: Any, **kwargs: Any) -> None:
        _deferred.append(functools.partial(print_args, *args, **kwargs))

    return later


def print_deferred_arguments() -> None:
    """Print Megatron's arguments, now that they are final."""
    while _deferred:
        _deferred.pop(0)()


PRINT_ARGS = Hook(
    "megatron.training.arguments", "_print_args", FLAG, "prints the arguments with the final layout", _defer
)
