"""The simulated step as a picture, or as a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_balance.errors import BalanceError
from megatron_balance.files import write_text
from megatron_balance.plots import INK, check_matplotlib, png
from megatron_balance.trace_events import FIRST_PROCESS, labels, operation

if TYPE_CHECKING:
    from megatron_balance.schedule.simulate import Timeline

_KINDS = ("forward", "backward")
_COLOURS = {"forward": "#3b7dd8", "backward": "#f2994a"}
_IDLE = "#eef0f3"
_BAR = 0.8  # height of a rank's bar in units of the distance between ranks
_PALEST = 0.55  # share of white in the palest chunk's colour


def check_timeline_file(path: str) -> None:
    """Refuse what `draw_timeline` could not write, before anything is computed.

    Raises:
        BalanceError: the name ends in neither .png nor .json, or matplotlib is needed and not installed.
    """
    if path.endswith(".png"):
        check_matplotlib("a timeline as .png", ", or name a .json file for ui.perfetto.dev")
    elif not path.endswith(".json"):
        raise BalanceError(
            f"--timeline {path}: end the name in .png (a picture) or .json (a trace for ui.perfetto.dev)"
        )


def draw_timeline(path: str | os.PathLike[str], timelines: Mapping[str, Timeline]) -> None:
    """Write the steps, one above the other, as a picture or as a trace.

    Args:
        path: a name that ends in .png or .json.
        timelines: simulated steps by name, in the order in which they are shown.

    Raises:
        BalanceError: as in `check_timeline_file`; or the file cannot be written.
    """
    check_timeline_file(str(path))
    name = f"the timeline {path}"
    if str(path).endswith(".json"):
        write_text(path, json.dumps(trace(timelines)), name)
    else:
        write_text(path, picture(timelines), name)


# --- trace


def trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The steps in the Trace Event Format's JSON object form: a process for each step, a thread for each pipeline rank."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), FIRST_PROCESS):
        events.extend(labels("process", process, 1, f"{name}: {timeline.step_s:.4g} s", process))
        for rank in range(timeline.order.chunk.shape[0]):
            events.extend(labels("thread", process, rank + 1, f"pipeline rank {rank}", rank))
        events.extend(_operations(process, timeline))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _operations(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    order = timeline.order
    ranks = order.chunk.shape[0]
    for rank, place in np.ndindex(order.chunk.shape):
        kind = _KINDS[int(order.is_backward[rank, place])]
        chunk, microbatch = int(order.chunk[rank, place]), int(order.microbatch[rank, place])
        start_s, end_s = timeline.start_s[rank, place], timeline.end_s[rank, place]
        yield operation(
            process,
            rank + 1,
            f"{kind} {microbatch}",
            kind,
            round(1e6 * float(start_s), 3),
            round(1e6 * float(end_s - start_s), 3),
            microbatch=microbatch,
            chunk=chunk,
            stage=chunk * ranks + rank,
            on_critical_path=bool(timeline.critical[rank, place]),
        )


# --- picture


def picture(timelines: Mapping[str, Timeline]) -> bytes:
    """The steps as a PNG: a row for each rank, forward and backward by colour, chunks by shade."""
    from matplotlib.figure import Figure

    ranks, longest_s = _ranks(timelines), max(timeline.step_s for timeline in timelines.values())
    figure = Figure(figsize=(14, len(timelines) * (1.0 + 0.28 * ranks)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(axes, name, timeline)
    panels[-1].set_xlim(0, longest_s * 1.005)
    panels[-1].set_xlabel("seconds since the step began (simulated)", color=INK)
    figure.legend(handles=_legend(timelines), loc="outside lower center", ncols=8, frameon=False)
    return png(figure)


def _panel(axes: Any, name: str, timeline: Timeline) -> None:
    order, chunks = timeline.order, int(timeline.order.chunk.max()) + 1
    ranks = order.chunk.shape[0]
    for rank in range(ranks):
        axes.barh(rank, timeline.step_s, height=_BAR, color=_IDLE, zorder=0)
        for backward, kind in enumerate(_KINDS):
            for chunk in range(chunks):
                shown = (order.is_backward[rank] == bool(backward)) & (order.chunk[rank] == chunk)
                start_s, end_s = timeline.start_s[rank, shown], timeline.end_s[rank, shown]
                bars = list(zip(start_s, end_s - start_s, strict=True))
                axes.broken_barh(
                    bars,
                    (rank - _BAR / 2, _BAR),
                    facecolors=_shade(kind, chunk, chunks),
                    edgecolor="white",
                    linewidth=0.3,
                )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{name}: {timeline.step_s:.4g} s a step, the ranks wait {100 * timeline.bubble:.1f} % of it"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.axvline(timeline.step_s, color=INK, linewidth=1.0)


def _shade(kind: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """The kind's colour, paler with each later chunk."""
    from matplotlib.colors import to_rgb

    white = _PALEST * chunk / max(chunks - 1, 1)
    return tuple((1 - white) * part + white for part in to_rgb(_COLOURS[kind]))


def _legend(timelines: Mapping[str, Timeline]) -> list[Any]:
    from matplotlib.patches import Patch

    chunks = max(int(timeline.order.chunk.max()) + 1 for timeline in timelines.values())
    patches = [
        Patch(color=_shade(kind, 0, chunks), label=kind + (", chunk 0" if chunks > 1 else "")) for kind in _KINDS
    ]
    if chunks > 1:
        patches += [
            Patch(color=_shade(kind, chunks - 1, chunks), label=f"{kind}, chunk {chunks - 1}") for kind in _KINDS
        ]
    return [*patches, Patch(color=_IDLE, label="waiting")]


def _ranks(timelines: Mapping[str, Timeline]) -> int:
    return next(iter(timelines.values())).order.chunk.shape[0]
