"""The plan as plain text, for a terminal or a log file."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from megatron_balance.figures import percent, seconds, signed_percent

if TYPE_CHECKING:
    from megatron_balance.pipeline.plan import Plan  # whose search loads compiled code

_LABEL_WIDTH = 12
_GB = 1e9
_MOST_CHUNKS = 4  # whose busy shares are shown one by one


def render_plan(plan: Plan, width: int = 100) -> str:
    """What was decided, on what costs, and what it gives.

    Args:
        plan: the plan.
        width: columns; longer values continue on the next line.
    """
    costs = [
        ("costs", plan.costs_source),
        ("embedding", _in_layers(plan.embedding_in_layers)),
        ("head", _in_layers(plan.head_in_layers)),
    ]
    if plan.p2p_s:
        costs.append(("transfer", f"{seconds(plan.p2p_s)} from stage to stage, by the device's link"))
    if plan.limit_bytes is not None:
        costs.append(("memory", f"at most {plan.limit_bytes / _GB:.2f} GB a rank"))
    outcome = [
        ("balance", f"the largest stage takes {plan.max_stage_over_mean:.2f} times the mean stage"),
        ("step", _step(plan)),
        ("uniform", _uniform(plan)),
        ("even", f"{_beside(plan.even_step_s, plan)} if the work could be cut anywhere"),
        ("bound", _bound(plan)),
        ("limited by", plan.limited_by),
    ]
    sections = [[labelled(*line, width) for line in lines] for lines in (costs, outcome)]
    return "\n".join([_title(plan), *sections[0], "", *_stage_table(plan), "", *sections[1]])


def _title(plan: Plan) -> str:
    sizes = plan.topology
    virtual = f", {sizes.virtual_size} virtual stages each" if sizes.virtual_size > 1 else ""
    return (
        f"Pipeline plan: {_number(sum(plan.layers), 'layer')} on {_number(sizes.pipeline_size, 'pipeline rank')}"
        f"{virtual}, {_number(sizes.num_microbatches, 'micro-batch', 'es')} a step"
    )


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def labelled(label: str, value: str, width: int) -> str:
    """A value behind its label; longer ones continue on the next line."""
    indent = " " * (_LABEL_WIDTH + 2)
    return textwrap.fill(f"  {label:<{_LABEL_WIDTH}}{value}", width, subsequent_indent=indent, break_on_hyphens=False)


def _in_layers(cost: tuple[float, float]) -> str:
    return f"{cost[0]:.2f} layers forward, {cost[1]:.2f} backward"


def _stage_table(plan: Plan) -> Iterator[str]:
    """One line a pipeline rank; ranks in a row that are alike share one."""
    rows = [_rank_row(plan, rank) for rank in range(plan.topology.pipeline_size)]
    lines = [("rank", "layers", "forward", "backward", *["memory"] * (plan.peak_bytes is not None), "busy")]
    for row, ranks in groupby(range(len(rows)), key=rows.__getitem__):
        alike = list(ranks)
        lines.append((f"{alike[0]}-{alike[-1]}" if len(alike) > 1 else f"{alike[0]}", *row))
    yield from aligned(lines)


def aligned(lines: Sequence[Sequence[str]], left: Container[int] = ()) -> Iterator[str]:
    """Rows of a table, each column as wide as its longest cell, those in ``left`` aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            f"{cell:{'<' if column in left else '>'}{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield f"  {'   '.join(cells)}".rstrip()


def _rank_row(plan: Plan, rank: int) -> tuple[str, ...]:
    """Layers, seconds of a micro-batch, peak memory where known, and busy share, over the rank's chunks."""
    chunks = slice(rank, None, plan.topology.pipeline_size)
    stages, shares = plan.stages[chunks], plan.busy_share[chunks]
    busy = percent(sum(shares))
    if 1 < len(shares) <= _MOST_CHUNKS:
        busy = f"{' + '.join(f'{100 * share:.1f}' for share in shares)} = {busy}"
    memory = [] if plan.peak_bytes is None else [f"{plan.peak_bytes[rank] / _GB:.2f} GB"]
    return (
        " + ".join(str(stage.layers) for stage in stages),
        seconds(sum(stage.forward_s for stage in stages)),
        seconds(sum(stage.backward_s for stage in stages)),
        *memory,
        busy,
    )


def _step(plan: Plan) -> str:
    waiting = f"the ranks wait {percent(plan.bubble)} of it (bubble)"
    if not plan.update_s:
        return f"{seconds(plan.step_s)} simulated; {waiting}"
    pipeline_s = plan.step_s - plan.update_s
    return (
        f"{seconds(plan.step_s)} simulated: the pipeline {seconds(pipeline_s)}, {waiting}; gradient norm and optimizer"
        f" {seconds(plan.update_s)}"
    )


def _uniform(plan: Plan) -> str:
    if plan.uniform_step_s is None:
        return f"not legal: {sum(plan.layers)} layers on {len(plan.stages)} stages"
    if len(set(plan.layers)) == 1:
        return "this is the uniform split"
    ratio = plan.uniform_step_s / plan.step_s
    if abs(ratio - 1) < 5e-4:
        return f"{seconds(plan.uniform_step_s)}: as fast as this plan"
    return f"{_beside(plan.uniform_step_s, plan)}: this plan is {ratio:.3f} times faster"


def _bound(plan: Plan) -> str:
    fills = " that fills every stage" if plan.topology.virtual_size == 1 else ""
    fits = " and fits the memory" if fills else " that fits the memory"
    splits = f"no split{fills}{fits if plan.limit_bytes is not None else ''}"
    if plan.step_s <= plan.bound_s * (1 + 1e-9):
        return f"{splits} is faster"
    return f"{splits} is below {_beside(plan.bound_s, plan)}{'' if plan.proven else '; whether one comes near is not known'}"


def _beside(step_s: float, plan: Plan) -> str:
    """A step's seconds, and how much longer than the plan's that is."""
    return f"{seconds(step_s)} ({signed_percent(step_s / plan.step_s - 1)})"
