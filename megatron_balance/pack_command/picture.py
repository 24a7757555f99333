"""The report as a picture: lengths, what a step takes in each way, and where its cost lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_balance.figures import signed_percent
from megatron_balance.pack_command.text import short
from megatron_balance.plots import INK, heat_map, png, report_figure, titled

if TYPE_CHECKING:
    from megatron_balance.pack_command.report import Report
    from megatron_balance.pack_command.study import Step, Study

_WORK, _WAIT, _OURS, _OURS_WAIT = "#9db7d9", "#e4e7ec", "#2f6fc4", "#bcd2ef"
_DOCUMENTS, _TOKENS = "#f2b880", "#3b7dd8"
_BOUND = "#c0392b"
_COLOURS = "YlGnBu"
_LEAST_RANGE = 0.05  # of colours around the mean: what hardly differs looks so


def picture(report: Report, found: Study) -> bytes:
    """A PNG: the histogram of lengths, a bar for each way, and the first step's cost by rank and micro-batch."""
    figure = report_figure(9.2, _headline(report))
    rows = figure.subfigures(2, 1, height_ratios=(1.0, 1.05))
    lengths, ways = rows[0].subplots(1, 2, width_ratios=(1.0, 1.35))
    _lengths(lengths, report)
    _ways(ways, report)
    _heatmaps(rows[1], report, found)
    return png(figure)


def _headline(report: Report) -> str:
    from megatron_balance.pack_command.report import UNDIVIDED

    request, gain = report.request, report.gain_over(UNDIVIDED)
    sizes = request.grid.topology
    virtual = f" VPP{sizes.virtual_size}" if sizes.virtual_size > 1 else ""
    bins, microbatches = request.grid.num_bins, sizes.num_microbatches
    return (
        f"Packed: {signed_percent(gain)} tokens a second over stock's chopped documents\n{bins:,} bin{'s' * (bins > 1)} of"
        f" {request.rule.seq_length:,} tokens a step, DP{sizes.data_size} PP{sizes.pipeline_size}{virtual},"
        f" {microbatches} micro-batch{'es' * (microbatches > 1)} of {sizes.micro_batch_size}"
    )


# --- lengths


def _lengths(axes: Any, report: Report) -> None:
    bars = report.histogram
    documents, tokens = sum(bar.documents for bar in bars), max(1, sum(bar.tokens for bar in bars))
    place = np.arange(len(bars))
    axes.bar(place - 0.2, [100 * bar.documents / documents for bar in bars], 0.4, color=_DOCUMENTS, label="documents")
    axes.bar(place + 0.2, [100 * bar.tokens / tokens for bar in bars], 0.4, color=_TOKENS, label="tokens in them")
    axes.set_xticks(place - 0.5, [_edge(bar.first) for bar in bars])
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(0, 1.22 * axes.get_ylim()[1])  # room for the words above the bars
    seq_length = report.request.rule.seq_length
    if bars[0].first < seq_length <= bars[-1].last:
        at = np.interp(np.log2(seq_length), np.log2([max(bar.first, 1) for bar in bars]), place) - 0.5
        axes.axvline(at, color=_BOUND, linewidth=1.2)
        left = at > len(bars) / 2
        text = f"a bin: {seq_length:,} " if left else f" a bin: {seq_length:,}"
        where = {"xycoords": ("data", "axes fraction"), "ha": "right" if left else "left", "va": "top"}
        axes.annotate(text, (at, 0.985), color=_BOUND, **where)
    axes.set_ylabel("% of all", color=INK)
    axes.set_xlabel("tokens of a document, from ... on", color=INK)
    axes.legend(frameon=False, loc="upper left")
    titled(axes, f"{documents:,} documents, {short(tokens)} tokens")


def _edge(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else f"{tokens}"


# --- the step in each way


def _ways(axes: Any, report: Report) -> None:
    """Bars in units of a step in which no rank of this plan ever waits, for the same number of tokens."""
    from megatron_balance.pack_command.report import OURS

    unit_s = report.ours.work_s_per_token
    for place, one in enumerate(report.outcomes):
        step, work, ours = one.s_per_token / unit_s, one.work_s_per_token / unit_s, one.key == OURS
        axes.barh(place, work, 0.62, color=_OURS if ours else _WORK)
        axes.barh(place, step - work, 0.62, left=work, color=_OURS_WAIT if ours else _WAIT)
        axes.text(step + 0.012, place, f"{step:.2f}", va="center", color=INK, fontweight="bold" if ours else "normal")
    axes.set_yticks(range(len(report.outcomes)), [one.name for one in report.outcomes])
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(report.outcomes) - 0.45, -0.55)
    axes.set_xlim(0, 1.1 * max(one.s_per_token for one in report.outcomes) / unit_s)
    axes.axvline(report.bound_over_ideal, color=_BOUND, linewidth=1.2)
    axes.set_xlabel("time for the same tokens; 1 = this plan's work with no rank ever waiting", color=INK)
    _ways_legend(axes)
    titled(axes, f"A step, simulated (mean of {report.ours.steps})")


def _ways_legend(axes: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_WORK, label="work"),
        Patch(color=_WAIT, label="ranks wait"),
        Line2D([], [], color=_BOUND, label="no placement of this plan's documents is below"),
    ]
    axes.legend(handles=handles, frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.31), ncols=3)


# --- where the cost lies


def _heatmaps(figure: Any, report: Report, found: Study) -> None:
    from megatron_balance.pack_command.report import CHOPPED, OURS

    shown = [(report.outcome(key).name, found.steps[key][0]) for key in (CHOPPED, OURS)]
    costs = [step.seconds.sum(axis=0) for _, step in shown]
    mean = float(costs[1].mean())
    least = min(1 - _LEAST_RANGE, *(float(cost.min()) / mean for cost in costs))
    most = max(1 + _LEAST_RANGE, *(float(cost.max()) / mean for cost in costs))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, step), cost in zip(panels, shown, costs, strict=True):
        image = heat_map(axes, cost / mean, _COLOURS, least, most)
        axes.set_xlabel("micro-batch of the step", color=INK)
        titled(axes, f"The first step, {name}", _balance(report, step))
    panels[0].set_ylabel("data-parallel rank", color=INK)
    bar = figure.colorbar(image, ax=panels, pad=0.01, fraction=0.03)
    bar.set_label("cost of a micro-batch over this plan's mean one", color=INK)
    bar.outline.set_visible(False)


def _balance(report: Report, step: Step) -> str:
    from megatron_balance.packing.step import judge_of

    costs = step.seconds.sum(axis=0)
    ranks = costs.sum(axis=1)
    return (
        f"costliest rank {ranks.max() / ranks.mean():.3f} of the mean one, micro-batch {costs.max() / costs.mean():.2f};"
        f" step {judge_of(report.request.grid).step_over_ideal(step.seconds):.3f} of one without waiting"
    )
