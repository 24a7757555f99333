"""A report as plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_balance.errors import BalanceError
from megatron_balance.figures import percent, signed_percent
from megatron_balance.pipeline.plan import Plan
from megatron_balance.pipeline.show import aligned, labelled, render_plan
from megatron_balance.planning.formats import bridge_line, deepspeed_class, deepspeed_parts, layers_flags
from megatron_balance.planning.report import Report
from megatron_balance.planning.study import Alternative

_WORTH_IT = 0.005  # of a step; less is not worth a change
_GB = 1e9


def render_report(report: Report, layout_format: str, width: int = 100) -> str:
    """The plan, its alternatives, how sure it is, and the layout to paste.

    Args:
        report: what was found.
        layout_format: ``megatron``, ``layers``, ``bridge`` or ``deepspeed``.
        width: columns.

    Raises:
        BalanceError: that framework cannot run the plan.
    """
    pasted = layout_to_paste(report, layout_format)
    sections = [
        render_plan(report.plan, width),
        "\n".join(labelled(label, text, width) for label, text in _verdict(report)),
        "\n".join(_alternatives(report)),
        "\n".join(_sensitivity(report)),
        pasted,
    ]
    return "\n\n".join(section for section in sections if section)


def layout_to_paste(report: Report, layout_format: str) -> str:
    """The layout as a framework takes it.

    Raises:
        BalanceError: that framework cannot run the plan.
    """
    plan, job = report.plan, report.job
    if layout_format == "deepspeed":
        parts = deepspeed_parts(plan.layers, plan.topology.virtual_size, plan.mtp_num_layers)
        specs = f"layer specs: embedding, {sum(plan.layers)} layers, head (final norm, output layer, loss): {parts[-1]}"
        return f"# {specs}\n# PipelineModule.parts: {list(parts)}\n{deepspeed_class(parts)}"
    if layout_format == "layers" and job.pattern is None:
        return layers_flags(plan.layers, plan.topology.virtual_size, plan.mtp_num_layers, plan.mtp_stage)
    if layout_format == "layers":
        raise BalanceError(
            "--format layers is for a Megatron without layouts, which splits no hybrid model: leave it out"
        )
    if layout_format == "bridge" and job.pattern is None:
        return bridge_line(report.layout, plan.topology.virtual_size)
    if layout_format == "bridge":
        return f"cfg.model.hybrid_layer_pattern = {report.layout!r}"
    return f"{job.layout_flag} '{report.layout}'"


def _verdict(report: Report) -> Iterator[tuple[str, str]]:
    """What is gained over Megatron's flags, what more memory would buy, and ways out where a split does not help."""
    plan, rival = report.plan, report.rival
    if rival is not None:
        gain = rival.step_s / plan.step_s - 1
        text = f"{percent(gain)} over the best of Megatron's flags, {rival.name}"
        if gain < _WORTH_IT:
            most = rival.step_s / plan.bound_s - 1
            text += f": keep that; no split can gain more than {percent(most)}"
        yield "gain", text
    if (more := _more_memory(report)) is not None:
        yield "memory", more
    if (ways := _ways_out(report)) is not None:
        yield "ways out", ways


def _more_memory(report: Report) -> str | None:
    plan, planned = report.plan, report.planned
    if planned.unlimited is None:
        return None
    parts = []
    if planned.tenth_more is not None:
        parts.append(
            f"a limit of {1.1 * plan.limit_bytes / _GB:.1f} GB (+10 %) would gain {_gain(plan, planned.tenth_more)}"
        )
    peak = max(planned.unlimited.peak_bytes) / _GB
    parts.append(f"no limit {_gain(plan, planned.unlimited)}, with {peak:.1f} GB on the fullest rank")
    return "; ".join(parts)


def _gain(plan: Plan, other: Plan) -> str:
    return percent(plan.step_s / other.step_s - 1)


def _ways_out(report: Report) -> str | None:
    """Where the head alone is heavier than an even stage no split helps."""
    plan = report.plan
    stages = len(plan.stages)
    total_s = sum(stage.total_s for stage in plan.stages)
    head_s = report.head_s
    if stages == 1 or head_s <= total_s / stages or plan.bound_s <= plan.even_step_s:
        return None
    most = int(total_s / head_s)
    fewer = "1 stage" if most == 1 else f"{most} stages or fewer"
    virtual = " or virtual stages" if plan.topology.virtual_size > 1 else ""
    return (
        f"no split helps against a head of {head_s * stages / total_s:.2f} even stages: the step stays"
        f" {100 * (plan.bound_s / plan.even_step_s - 1):.1f} % above an even one at least. Use {fewer} (fewer"
        f" pipeline ranks{virtual}, with tensor parallelism in their place), or a smaller vocabulary"
    )


def _alternatives(report: Report) -> Iterator[str]:
    yield "Alternatives"
    legal = [one for one in report.alternatives if one.legal]
    lines = [("split", "over even", "longer", "memory", "")]
    lines.append(("this plan", f"{report.over_even(report.plan.step_s):.4f}", "", _memory(_peak(report)), ""))
    lines += [_alternative_row(report, one) for one in legal]
    yield from aligned(lines, left=(0, 4))
    for one in report.alternatives:
        if not one.legal:
            yield f"  {one.name}: not legal, {one.reason}"


def _alternative_row(report: Report, one: Alternative) -> tuple[str, ...]:
    longer = signed_percent(one.step_s / report.plan.step_s - 1)
    return one.name, f"{report.over_even(one.step_s):.4f}", longer, _memory(one.peak_bytes), one.reason


def _peak(report: Report) -> float | None:
    return max(report.plan.peak_bytes) if report.plan.peak_bytes else None


def _memory(peak_bytes: float | None) -> str:
    return "" if peak_bytes is None else f"{peak_bytes / _GB:.2f} GB"


def _sensitivity(report: Report) -> Iterator[str]:
    if len(report.plan.stages) == 1:
        return
    beside = "" if report.rival is None else f", beside {report.rival.name}"
    yield f"If the head costs something else{beside}"
    lines = [("head", "over even", "gain")]
    for one in report.sensitivity:
        gain = "" if one.gain is None else signed_percent(one.gain)
        lines.append((f"x {one.scale:g}", f"{one.iteration_over_even:.4f}", gain))
    yield from aligned(lines)
