"""The report as a picture: where the slow workers are, what holds the job up, its stages, and a step real against ideal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_balance.diagnose_command.report import Report, ratio
from megatron_balance.diagnose_command.timeline import IDEAL, REAL, StepTimeline
from megatron_balance.diagnosis.trace import BACKWARD, COMBINED, FORWARD
from megatron_balance.figures import percent, seconds, signed_percent
from megatron_balance.plots import INK, heat_map, png, report_figure, titled

_FORWARD, _BACKWARD, _ONCE, _IDLE = "#2f6fc4", "#e08a2e", "#7b61b0", "#e9ecf1"
_BAD = "#b3261e"
_SHADES = (_IDLE, "#f0b8a4", "#d9604a", "#8f1510")
_BAR = 0.82
_MOST_NUMBERED = (16, 10)  # rows and columns of a heatmap whose cells have their number written in


def picture(report: Report, timelines: Mapping[str, StepTimeline]) -> bytes:
    """A PNG.

    Args:
        report: what was found.
        timelines: ``real`` and ``ideal``, of one step; drawn for the data-parallel rank that finishes last.
    """
    stages = report.diagnosis.slowdown.by_worker.shape[0]
    lanes = min(max(2 * (0.6 + 0.24 * stages), 3.0), 9.0)
    figure = report_figure(5.4 + lanes, _headline(report))
    rows = figure.subfigures(2, 1, height_ratios=(4.6, lanes))
    heatmap, causes, bars = rows[0].subplots(1, 3, width_ratios=(1.5, 0.85, 0.9))
    _heatmap(rows[0], heatmap, report)
    _causes(causes, report)
    _stages(bars, report)
    _timelines(rows[1], report, timelines)
    return png(figure)


def _headline(report: Report) -> str:
    fix = f"; the fix: {signed_percent(report.diagnosis.fixes[0].gain)} predicted" if report.diagnosis.fixes else ""
    return f"{report.headline}{fix}\n{_shortened(report.name)}: {report.sizes}"


def _shortened(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


def _heatmap(figure: Any, axes: Any, report: Report) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    by_worker, most = report.diagnosis.slowdown.by_worker, report.darkest
    colours = LinearSegmentedColormap.from_list("slowdown", _SHADES)
    image = heat_map(axes, by_worker, colours, 1, most)
    if by_worker.shape[1] <= _MOST_NUMBERED[1] and by_worker.shape[0] <= _MOST_NUMBERED[0]:
        for (stage, dp_rank), value in np.ndenumerate(by_worker):
            dark = (value - 1) / (most - 1) > 0.5
            axes.text(
                dp_rank, stage, ratio(value), ha="center", va="center", color="white" if dark else INK, fontsize=9
            )
    axes.set_xlabel("data-parallel rank", color=INK)
    axes.set_ylabel("pipeline rank", color=INK)
    titled(axes, "Where: slowdown of each worker")
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04)
    bar.outline.set_visible(False)


def _causes(axes: Any, report: Report) -> None:
    shares = sorted(report.diagnosis.causes.items(), key=lambda one: -one[1])
    rows = [*shares, ("no name", report.unnamed)]
    for place, (name, share) in enumerate(rows):
        share = max(float(np.nan_to_num(share)), 0.0)
        axes.barh(place, 100 * share, 0.6, color=_IDLE if name == "no name" else _BAD if place == 0 else "#d9826f")
        axes.text(100 * share + 1.5, place, percent(share, 0), va="center", color=INK)
    axes.set_yticks(range(len(rows)), [name.replace(" ", "\n", 1) for name, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(120.0, 120 * max((share for _, share in rows), default=1)))
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    titled(axes, f"Why: shares of the lost {percent(max(report.diagnosis.slowdown.slowdown - 1, 0))}")


def _stages(axes: Any, report: Report) -> None:
    stage_ms = 1e3 * np.nan_to_num(report.stage_s)
    place, width = np.arange(stage_ms.shape[1]), 0.4
    for row, (name, colour) in enumerate((("forward", _FORWARD), ("backward", _BACKWARD))):
        axes.bar(place + (row - 0.5) * width, stage_ms[row], width * 0.94, color=colour, label=name)
    _whole_stage_ticks(axes, place.size)
    axes.set_xlabel("stage", color=INK)
    axes.set_ylabel("ms of a micro-batch, mean", color=INK)
    axes.set_ylim(0, 1.18 * float(stage_ms.max() or 1))
    axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
    titled(axes, "Stages")


def _whole_stage_ticks(axes: Any, stages: int) -> None:
    apart = -(-stages // 12)
    axes.set_xticks(range(0, stages, apart), [str(stage) for stage in range(0, stages, apart)])


# --- the step


def _timelines(figure: Any, report: Report, timelines: Mapping[str, StepTimeline]) -> None:
    step, dp_rank = timelines[REAL].step, timelines[REAL].last_dp_rank
    panels = figure.subplots(2, 1, sharex=True)
    words = {REAL: f"Step {step} as recorded, DP rank {dp_rank}", IDEAL: "The same if nothing straggled"}
    for axes, name in zip(panels, (REAL, IDEAL), strict=True):
        _panel(axes, timelines[name], dp_rank, report.diagnosis.slowdown.by_worker.shape[0])
        titled(axes, f"{words[name]}: {seconds(timelines[name].step_s)}")
    panels[-1].set_xlim(0, 1.005 * max(timeline.step_s for timeline in timelines.values()))
    panels[-1].set_xlabel("seconds since the step began", color=INK)
    _legend(figure)


def _panel(axes: Any, timeline: StepTimeline, dp_rank: int, stages: int) -> None:
    mine = timeline.only((timeline.dp_rank == dp_rank) & ~timeline.transfers)
    colours = [
        {FORWARD: _FORWARD, BACKWARD: _BACKWARD, COMBINED: _BACKWARD}.get(kind, _ONCE) for kind in timeline.kinds
    ]
    for stage in range(stages):
        axes.barh(stage, timeline.step_s, height=_BAR, color=_IDLE, zorder=0)
        for kind, colour in enumerate(colours):
            shown = (mine.pp_rank == stage) & (mine.kind == kind)
            working_s = mine.working_s[shown]
            bars = list(zip(mine.end_s[shown] - working_s, working_s, strict=True))
            zorder = 1 if colour == _ONCE else 2  # passes over the communication that they hide
            axes.broken_barh(
                bars, (stage - _BAR / 2, _BAR), facecolors=colour, edgecolor="white", linewidth=0.3, zorder=zorder
            )
    apart = -(-stages // 16)
    axes.set_yticks(range(0, stages, apart), [f"PP {stage}" for stage in range(0, stages, apart)])
    axes.set_ylim(stages - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left"]].set_visible(False)
    axes.axvline(timeline.step_s, color=INK, linewidth=1.2)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    names = ((_FORWARD, "forward"), (_BACKWARD, "backward"), (_ONCE, "once a step"), (_IDLE, "waiting"))
    handles = [Patch(color=colour, label=label) for colour, label in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
