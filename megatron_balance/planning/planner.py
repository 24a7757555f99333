"""The one function that makes a job's plan, for training and for `megatron-balance plan` alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.devices import Device
from megatron_balance.costs.memory import ChainMemory, Optimizer, chain_memory
from megatron_balance.errors import BalanceError
from megatron_balance.model import ModelSpec
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.pipeline.memory import MemoryLimit, device_limit_bytes, limit_like, rank_peaks
from megatron_balance.pipeline.plan import Plan, make_plan
from megatron_balance.planning.flags import UNIFORM, MemoryWish
from megatron_balance.reading import Scalar
from megatron_balance.topology import Topology

_NOTICEABLE = 1e-3  # of a step
_NO_WISH = MemoryWish()


@dataclass(frozen=True)
class Planned:
    """A plan and what its memory limit did to it.

    Attributes:
        plan: the best that was found within the limit.
        memory: of the elements.
        unlimited: the best that was found without the limit; None where that is no faster, or was not asked for.
        tenth_more: the same with a limit a tenth higher.
    """

    plan: Plan
    memory: ChainMemory
    unlimited: Plan | None = None
    tenth_more: Plan | None = None


def plan_job(
    costs: ChainCosts,
    model: ModelSpec,
    topology: Topology,
    arguments: Mapping[str, Any],
    fingerprinted: Mapping[str, Scalar],
    *,
    wish: MemoryWish = _NO_WISH,
    device: Device | None = None,
    mtp_stages: Sequence[int] | None = None,
    allow_empty: bool = False,
    starts: Sequence[Sequence[int]] = (),
    p2p_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    asks_more: bool = False,
    sharpens_bound: bool = True,
) -> Planned:
    """Plan a job within its memory.

    Args:
        costs: of the elements, for one micro-batch of this topology.
        model: the model.
        topology: sizes of the job.
        arguments: Megatron's, by name; what they say about the optimizer.
        fingerprinted: names and values that the plan holds for.
        wish: what the command line says about memory.
        device: whose memory limits a rank where ``wish`` does not; None for no limit.
        mtp_stages: stages in which multi-token prediction may stand; None is the last only.
        allow_empty: whether stages between the first and the last may be without layers, though no rank may be without any.
        starts: more splits to search from, such as the user's own.
        p2p_s: seconds of a transfer between stages.
        say: told what goes on.
        asks_more: whether to find out what more memory would buy.
        sharpens_bound: whether to spend time on a bound that comes near the step.

    Raises:
        BalanceError: nothing fits the memory, a layout in ``wish`` is not one of this job, or as ``make_plan``.
    """
    memory = chain_memory(model, topology, Optimizer.from_arguments(arguments))
    like = None
    if wish.like is not None:
        like = layout_of_wish(wish.like, model.num_layers, model.mtp_num_layers, topology, mtp_stages is None)
        starts = [*starts, like.layers]
    limit_bytes = _limit_bytes(wish, like, device, memory, topology, say)

    def make(limit_bytes: float | None, *more_starts: Sequence[int], sharpens_bound: bool = False) -> Plan:
        search: dict[str, Any] = {
            "memory": None if limit_bytes is None else MemoryLimit(memory, limit_bytes),
            "mtp_stages": mtp_stages,
            "starts": [*starts, *more_starts],
            "say": say,
            "sharpens_bound": sharpens_bound,
        }
        plan = make_plan(costs, topology, fingerprinted, model.mtp_num_layers, p2p_s, allow_empty=allow_empty, **search)
        if plan.split.empty_ranks(topology.pipeline_size):
            say(
                "the fastest split leaves a rank without any layer, which Megatron cannot load: planning without empty stages"
            )
            search["starts"] = [split for split in search["starts"] if min(split[1:-1], default=1)]
            plan = make_plan(costs, topology, fingerprinted, model.mtp_num_layers, p2p_s, **search)
        peaks = rank_peaks(memory, topology, plan.layers, plan.mtp_stage)
        return replace(plan, peak_bytes=tuple(map(float, peaks)))

    plan = make(limit_bytes, sharpens_bound=sharpens_bound)
    if limit_bytes is None or not asks_more:
        return Planned(plan, memory)
    say("what more memory would buy:")
    unlimited = make(None, plan.layers)
    if max(unlimited.peak_bytes) <= limit_bytes or plan.step_s <= unlimited.step_s * (1 + _NOTICEABLE):
        return Planned(plan, memory)
    more_bytes, tenth_more = 1.1 * limit_bytes, unlimited
    if max(unlimited.peak_bytes) > more_bytes:
        tenth_more = make(more_bytes, plan.layers)
    return Planned(replace(plan, limited_by=_limited_by_memory(plan, unlimited)), memory, unlimited, tenth_more)


def layout_of_wish(
    like: str, num_layers: int, mtp_num_layers: int, topology: Topology, mtp_last: bool = False
) -> Layout:
    """The layout that ``--balanced-pipeline-memory-like`` names.

    Raises:
        BalanceError: it is not one of this job.
    """
    try:
        if like == UNIFORM:
            return Layout.of(stock.even_split(num_layers, topology), mtp_num_layers)
        layout = parse_layout(like)
        stock.check_layout(layout, num_layers, mtp_num_layers, topology, mtp_last)
    except BalanceError as error:
        raise BalanceError(
            f"--balanced-pipeline-memory-like {like}: {error}; name a layout of this job, or give --balanced-pipeline-memory-gb"
        ) from error
    return layout


def _limit_bytes(
    wish: MemoryWish,
    like: Layout | None,
    device: Device | None,
    memory: ChainMemory,
    topology: Topology,
    say: Callable[[str], None],
) -> float | None:
    if wish.gigabytes is not None:
        return wish.gigabytes * 1e9
    if like is not None:
        return limit_like(memory, topology, like.layers, like.mtp_stage).limit_bytes
    limit_bytes = None if device is None else device_limit_bytes(device)
    if limit_bytes is not None:
        kept = device.reserve_bytes / 1e9
        say(
            f"a rank may occupy {limit_bytes / 1e9:.1f} GB: {device.name} has {device.memory_bytes / 1e9:.1f} GB, of which"
            f" {kept:.1f} GB are kept in reserve"
        )
    return limit_bytes


def _limited_by_memory(plan: Plan, unlimited: Plan) -> str:
    shorter = 100 * (1 - unlimited.step_s / plan.step_s)
    return (
        f"memory: without its limit the step would be {shorter:.1f} % shorter, with {max(unlimited.peak_bytes) / 1e9:.1f} GB"
        f" instead of {max(plan.peak_bytes) / 1e9:.1f} GB on the fullest rank"
    )
