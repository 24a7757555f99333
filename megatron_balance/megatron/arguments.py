"""The flags that we add to Megatron's command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_balance.costs.devices import Device, device_chosen
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.packed.options import FLAG as PACKING
from megatron_balance.megatron.packed.options import add_arguments as add_packing_arguments
from megatron_balance.megatron.recorder.options import FLAG as TRACE
from megatron_balance.megatron.recorder.options import add_arguments as add_trace_arguments
from megatron_balance.planning.flags import (
    ANALYTIC,
    ANY,
    FLAG,
    LAST,
    PROFILE,
    MemoryWish,
    add_memory_arguments,
    layer_weight,
    memory_wish,
)
from megatron_balance.topology import Topology


def given_in(argv: list[str]) -> bool:
    """Whether a command line asks for anything of ours."""
    return any(argument.startswith((FLAG, PACKING, TRACE)) for argument in argv)


def topology_of(args: Any, num_microbatches: int) -> Topology:
    """The sizes of a job, from Megatron's validated arguments."""
    return Topology(
        pipeline_size=args.pipeline_model_parallel_size,
        num_microbatches=num_microbatches,
        virtual_size=args.virtual_pipeline_model_parallel_size or 1,
        micro_batch_size=args.micro_batch_size,
        tensor_size=args.tensor_model_parallel_size,
        context_size=args.context_parallel_size,
        data_size=args.data_parallel_size,
        microbatch_group_size=getattr(args, "microbatch_group_size_per_vp_stage", None),
        overlap_moe=bool(getattr(args, "overlap_moe_expert_parallel_comm", False)),
    )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the "megatron-balance" group to Megatron's parser."""
    group = parser.add_argument_group(title="megatron-balance")
    group.add_argument(
        FLAG,
        action="store_true",
        help="Give each pipeline stage layers by cost instead of by number: embedding and loss head count as the fractional"
        " layers that they cost. Replaces --pipeline-model-parallel-layout and the first/last-stage and account-for flags;"
        " the losses stay the same.",
    )
    group.add_argument(
        f"{FLAG}-embedding-weight",
        metavar="W|FWD,BWD",
        help="Cost of the embedding in layers, as one number or forward and backward apart, instead of what it was measured or"
        " estimated to be.",
    )
    group.add_argument(
        f"{FLAG}-head-weight",
        metavar="W|FWD,BWD",
        help="Cost of final norm, output layer and loss in layers, as one number or forward and backward apart, instead of"
        " what it was measured or estimated to be.",
    )
    group.add_argument(
        f"{FLAG}-costs",
        metavar="profile|analytic|FILE|DIR",
        help="What the plan stands on: times of the job's own modules, measured here in a process of its own before training"
        " starts (profile; the default when training, with estimates where it fails), estimates from data sheets (analytic;"
        " the default of a dry run), a costs file that `megatron-balance profile` wrote, or the folder of a trace that"
        " --straggler-trace recorded.",
    )
    group.add_argument(
        f"{FLAG}-device",
        metavar="NAME",
        help="Plan on estimates for this device: A100, H100, H200, B200, generic (a GPU), cpu, also with"
        " speeds of its own (H100,tflops=700,tbps=3). For a dry run on a login node.",
    )
    add_memory_arguments(group)
    group.add_argument(
        f"{FLAG}-mtp-placement",
        metavar="any|last",
        help="Stage of the multi-token-prediction layers: any of those that Megatron runs them in (any; the default), or the"
        " last one, beside the head (last).",
    )
    group.add_argument(
        f"{FLAG}-plan",
        metavar="FILE",
        help="Keep the plan in FILE (JSON): read when it exists, where it must be of this model, topology and costs, and written"
        " when a plan is made.",
    )
    group.add_argument(
        f"{FLAG}-replan",
        action="store_true",
        default=None,
        help="Use the plan (of the plan file, or made afresh) although a checkpoint with optimizer state is resumed, which"
        " otherwise keeps its layout; refused where that state is tied to it.",
    )
    group.add_argument(
        f"{FLAG}-dry-run",
        type=int,
        nargs="?",
        const=0,
        metavar="WORLD_SIZE",
        help="Print the plan for WORLD_SIZE processes (default: one model replica), or with --load the layout that a resume"
        " keeps, and exit, in a single process.",
    )
    add_packing_arguments(group)
    add_trace_arguments(group)
    return parser


@dataclass(frozen=True)
class Options:
    """Our flags, checked.

    Attributes:
        embedding_weight, head_weight: (forward, backward) cost in layers, None for what was measured or estimated.
        costs: ``profile``, ``analytic`` or the name of a costs file or trace; None where the command line does not say.
        device: whose speeds the estimate takes, None for the one here.
        memory: what a rank may occupy.
        mtp_placement: ``any`` or ``last``.
        plan_file: where the plan is kept, None for nowhere.
        replan: whether a resumed checkpoint may change its layout.
        dry_run: processes to plan for without training, 0 for one model replica; None to train.
    """

    embedding_weight: tuple[float, float] | None
    head_weight: tuple[float, float] | None
    costs: str | None
    device: Device | None
    memory: MemoryWish
    mtp_placement: str
    plan_file: str | None
    replan: bool
    dry_run: int | None

    @property
    def costs_kind(self) -> str:
        """``costs``, with what holds where the command line does not say."""
        return self.costs or (PROFILE if self.device is None and self.dry_run is None else ANALYTIC)

    @property
    def plans_for_elsewhere(self) -> bool:
        """Whether this is a dry run for a device that may not be here."""
        return self.dry_run is not None and self.device is not None

    @classmethod
    def from_args(cls, args: Any) -> Options | None:
        """The options of parsed arguments; None when balancing is not asked for.

        Raises:
            BalanceError: a value is not usable, or an option is given without the flag that it belongs to.
        """
        names = (
            "embedding-weight", "head-weight", "costs", "device", "memory-gb", "memory-like", "mtp-placement", "plan", "replan",
            "dry-run",
        )  # fmt: skip
        values = {name: getattr(args, f"balanced_pipeline_{name}".replace("-", "_"), None) for name in names}
        if not getattr(args, "balanced_pipeline", False):
            for name, value in values.items():
                if value is not None:
                    raise BalanceError(f"{FLAG}-{name} does nothing without {FLAG}: add it or leave both out")
            return None
        dry_run, device = values["dry-run"], values["device"]
        if dry_run is not None and dry_run < 0:
            raise BalanceError(f"{FLAG}-dry-run {dry_run}: the number of processes must be positive")
        for name in ("plan", "costs"):
            if values[name] == "":
                raise BalanceError(f"{FLAG}-{name} needs the name of a file, not an empty one")
        if device is not None and values["costs"] not in (None, ANALYTIC):
            raise BalanceError(
                f"{FLAG}-device {device} is for estimates, {FLAG}-costs {values['costs']} takes others: leave one out"
            )
        if values["mtp-placement"] not in (None, ANY, LAST):
            raise BalanceError(f"{FLAG}-mtp-placement {values['mtp-placement']}: must be {ANY} or {LAST}")
        return cls(
            embedding_weight=layer_weight(f"{FLAG}-embedding-weight", values["embedding-weight"]),
            head_weight=layer_weight(f"{FLAG}-head-weight", values["head-weight"]),
            costs=values["costs"],
            device=None if device is None else device_chosen(device),
            memory=memory_wish(values["memory-gb"], values["memory-like"]),
            mtp_placement=values["mtp-placement"] or ANY,
            plan_file=values["plan"],
            replan=bool(values["replan"]),
            dry_run=dry_run,
        )
