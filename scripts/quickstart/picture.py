"""Both pipelines' timelines of one typical step, as a PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from megatron_balance.plots import INK
from quickstart.observations import Operation, Step
from quickstart.report import Summary

COLOURS = {"forward": "#3b7dd8", "backward": "#f2994a"}
_IDLE, _OPTIMIZER = "#eef0f3", "#c3c8d1"
_BAR = 0.78  # height of a rank's bar in units of the distance between ranks
_NARROW = 0.013  # share of the width below which a bar has no room for its number


def draw(summary: Summary, uniform: Step, balanced: Step, path: Path) -> None:
    """Draw a typical step of each split to ``path``; ``summary`` gives the title and the labels."""
    with plt.rc_context({"font.size": 10, "text.color": INK, "xtick.color": INK, "ytick.color": INK}):
        figure, panels = plt.subplots(2, 1, figsize=(12, 6), sharex=True, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.12)
        losses = "the same losses" if summary.losses_agree else "BUT OTHER LOSSES"
        figure.suptitle(
            f"Pipeline stages of equal cost: {summary.measured_speedup:.2f} times faster, {losses}",
            fontsize=15,
            fontweight="bold",
        )
        panels[1].set_xlim(0, max(uniform.duration_s, balanced.duration_s) * 1.005)
        _panel(panels[0], "uniform", uniform, summary.uniform_split)
        _panel(panels[1], "balanced", balanced, summary.balanced_split)
        if balanced.duration_s < uniform.duration_s:
            _mark_saving(panels[1], uniform.duration_s, balanced.duration_s)
        panels[0].tick_params(axis="x", length=0)
        panels[0].spines["bottom"].set_visible(False)
        panels[1].set_xlabel("seconds since the step began", color=INK)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _mark_saving(axes: Axes, uniform_s: float, balanced_s: float) -> None:
    """An arrow from the end of the uniform step to the end of the balanced one."""
    middle = 0.5
    axes.axvline(uniform_s, color=INK, linewidth=1.2, linestyle=":")
    axes.annotate(
        "", (balanced_s, middle), (uniform_s, middle), arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 2}
    )
    text = f"{(uniform_s - balanced_s) / uniform_s:.0%} less time"
    axes.text((uniform_s + balanced_s) / 2, middle - 0.08, text, ha="center", va="bottom", fontweight="bold")


def _panel(axes: Axes, name: str, step: Step, layers: tuple[int, ...]) -> None:
    ranks = range(len(layers))
    for rank in ranks:
        axes.barh(rank, step.duration_s, height=_BAR, color=_IDLE)
        for operation in step.operations[rank]:
            _bar(axes, rank, operation, step)
        computed_s = max(operation.end_s for operation in step.operations[rank]) - step.start_s
        axes.barh(rank, step.duration_s - computed_s, left=computed_s, height=_BAR, color=_OPTIMIZER)
    axes.set_yticks(list(ranks), [_rank_label(rank, layers, step) for rank in ranks])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{name}: a step takes {step.duration_s:.2f} s", loc="left", fontsize=12, fontweight="bold")
    axes.axvline(step.duration_s, color=INK, linewidth=1.2)


def _bar(axes: Axes, rank: int, operation: Operation, step: Step) -> None:
    start_s, length_s = operation.start_s - step.start_s, operation.end_s - operation.start_s
    axes.barh(
        rank, length_s, left=start_s, height=_BAR, color=COLOURS[operation.kind], edgecolor="white", linewidth=0.6
    )
    if length_s < _NARROW * axes.get_xlim()[1]:
        return
    number = str(operation.microbatch + 1)
    axes.text(start_s + length_s / 2, rank, number, ha="center", va="center", fontsize=7.5, color="white")


def _rank_label(rank: int, layers: tuple[int, ...], step: Step) -> str:
    parts = (
        ["embedding"] * (rank == 0) + [_count(layers[rank])] * (layers[rank] > 0) + ["head"] * (rank == len(layers) - 1)
    )
    return f"stage {rank}: {' + '.join(parts)}\ncomputes {step.busy_s[rank] / step.duration_s:.0%} of the step"


def _count(layers: int) -> str:
    return f"{layers} layer{'s' * (layers != 1)}"


def _legend() -> list[Patch]:
    names = (
        ("forward", COLOURS["forward"]),
        ("backward", COLOURS["backward"]),
        ("waiting", _IDLE),
        ("gradient norm, optimizer", _OPTIMIZER),
    )
    return [Patch(color=colour, label=name) for name, colour in names]
