"""A report for a terminal: tables, and the heatmap of workers in blocks."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterator

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_balance.diagnose_command.comparison import Comparison
from megatron_balance.diagnose_command.report import Report, hours, printable, ratio
from megatron_balance.diagnosis.result import HEALTHY, NO, UNKNOWN, YES, Check, Fix
from megatron_balance.figures import percent, seconds, signed_percent

_WIDTH, _NARROWEST, _WIDEST = 100, 40, 140
_SHADES = " \u2591\u2592\u2593\u2588"
_STYLES = ("dim", "", "yellow", "bold yellow", "bold red")
_MOST_ROWS = 16
_ANSWERS = {YES: ("yes", "bold red"), NO: ("no", "green"), UNKNOWN: ("not measurable", "dim")}


def terminal_text(shown: RenderableType) -> str:
    """What standard output is sent: as wide as the terminal, coloured on one unless NO_COLOR is set."""
    stream, on_terminal = io.StringIO(), sys.stdout is not None and sys.stdout.isatty()
    coloured = on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    console = Console(
        file=stream,
        width=_width(on_terminal),
        force_terminal=coloured,
        no_color=not coloured,
        color_system="standard" if coloured else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _width(on_terminal: bool) -> int:
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        width = int(named)
    elif on_terminal:
        try:
            width = os.get_terminal_size(sys.stdout.fileno()).columns
        except OSError:
            width = _WIDTH
    else:
        width = _WIDTH
    return min(max(width, _NARROWEST), _WIDEST)


# --- a report


def render_report(report: Report) -> RenderableType:
    """Headline, slowdowns, workers, causes, stages, checklist and what to do."""
    sections: list[RenderableType] = [Group(*_head(report)), _slowdowns(report), Group(*_workers(report))]
    if report.diagnosis.causes:
        sections.append(_causes(report))
    sections.append(_stages(report))
    sections += _checklist(report.diagnosis.checklist)
    sections.append(Group(*_fixes(report)))
    return Group(*(Padding(section, (0, 0, 1, 0)) for section in sections[:-1]), sections[-1])


def _head(report: Report) -> Iterator[RenderableType]:
    found = report.diagnosis
    yield Text(f"{report.name}: {report.sizes}", "dim")
    yield Text(report.headline, "bold green" if found.verdict == (HEALTHY,) else "bold")
    yield Text(
        f"{hours(found.waste_gpu_hours)} GPU-hours wasted in these steps, {hours(found.waste_per_day_gpu_hours)} a day at this rate"
    )
    for problem in report.trace.problems:
        yield Text(f"partial: {printable(problem)}", "yellow")


def _slowdowns(report: Report) -> Table:
    slowdown = report.diagnosis.slowdown
    table = _table("Slowdown", "", "")
    worst = sorted(slowdown.by_operation.items(), key=lambda one: -_known(one[1]))
    table.add_row("S", ratio(slowdown.slowdown), "the step over one in which every duration is ideal")
    for name, one in worst[:4]:
        table.add_row("S_t", ratio(one), f"if only {printable(name)} were as recorded")
    place = np.unravel_index(np.nanargmax(slowdown.by_worker), slowdown.by_worker.shape)
    table.add_row(
        "S_w", ratio(slowdown.by_worker[place]), f"the slowest worker: DP rank {place[1]}, PP rank {place[0]}"
    )
    table.add_row("M_S", ratio(slowdown.last_stage), "of the slowdown goes with the last stage")
    table.add_row("M_W", ratio(slowdown.slowest_workers), "of it goes with the slowest 3 % of the workers")
    return table


def _known(number: float) -> float:
    return number if math.isfinite(number) else -math.inf


def _workers(report: Report) -> Iterator[RenderableType]:
    """A row of blocks for each PP rank; columns are DP ranks, or the slowest of neighbours where they do not fit."""
    by_worker, most = report.diagnosis.slowdown.by_worker, report.darkest
    columns = min(by_worker.shape[1], 60)
    groups = np.array_split(np.arange(by_worker.shape[1]), columns)
    wide = max(1, min(4, 60 // columns))
    yield Text("Workers, slowdown of each (across: DP ranks, down: PP ranks)", "bold")
    for rank, row in enumerate(by_worker[:_MOST_ROWS]):
        line = Text(f"  PP {rank:<3}")
        for group in groups:
            value = float(np.nanmax(row[group])) if np.isfinite(row[group]).any() else 1.0
            level = min(len(_SHADES) - 1, int(len(_SHADES) * max(0.0, value - 1) / (most - 1)))
            line.append(_SHADES[level] * wide, _STYLES[level])
        line.append(f"\u258f{ratio(float(np.nanmax(row)) if np.isfinite(row).any() else None)}")
        yield line
    if len(by_worker) > _MOST_ROWS:
        yield Text(f"  ... {len(by_worker) - _MOST_ROWS} more PP ranks", "dim")
    yield Text(f"  blank 1.0, {_SHADES[-1]} {most:.2f}; at the end of a row: its slowest worker", "dim")


def _causes(report: Report) -> Table:
    table = _table("Causes, shares of the slowdown", "", "gain without it", "")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, share in sorted(report.diagnosis.causes.items(), key=lambda one: -one[1]):
        alone = report.diagnosis.by_cause.get(name)
        table.add_row(
            name, percent(share), "" if alone is None else signed_percent(alone - 1), Text(_bar(share), "cyan")
        )
    table.add_row("no name", percent(report.unnamed), "", Text(_bar(report.unnamed), "dim"))
    return table


def _bar(share: float) -> str:
    return "\u2588" * round(30 * min(max(share, 0.0), 1.0))


def _stages(report: Report) -> Table:
    forward_s, backward_s = report.stage_s
    table = _table("Stages, seconds of a micro-batch", "forward", "backward", "over the others")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage in range(forward_s.size):
        others = np.arange(forward_s.size) != stage
        beside = []
        for row in (forward_s, backward_s):
            known = row[others][np.isfinite(row[others])]
            beside.append(f"{row[stage] / known.mean():.2f}x" if known.size and np.isfinite(row[stage]) else "-")
        table.add_row(f"stage {stage}", seconds(forward_s[stage]), seconds(backward_s[stage]), " / ".join(beside))
    return table


def _checklist(checks: tuple[Check, ...]) -> Iterator[RenderableType]:
    for cause in dict.fromkeys(check.cause for check in checks):
        table = _table(f"Symptoms of {cause}", "", "measured", "yes where")
        for check in checks:
            if check.cause == cause:
                table.add_row(
                    printable(check.symptom),
                    answer(check.answer),
                    printable(check.measured),
                    printable(check.threshold),
                )
        yield table


def answer(given: str) -> Text:
    """An answer of the checklist in its colour."""
    return Text(*_ANSWERS.get(given, (given, "")))


def _fixes(report: Report) -> Iterator[RenderableType]:
    yield Text("What to do", "bold")
    if not report.diagnosis.fixes:
        yield Text("  nothing that a flag could change was found")
    for fix in report.diagnosis.fixes:
        yield Padding(Text(fix_line(fix)), (0, 0, 0, 2))
        if fix.flags:
            yield Padding(Text(printable(" ".join(fix.flags)), "bold cyan", overflow="fold"), (0, 0, 0, 4))
        if fix.note:
            yield Padding(Text(printable(fix.note), "dim"), (0, 0, 0, 4))


def fix_line(fix: Fix) -> str:
    """What a fix is predicted to give, in a line."""
    memory = f", {fix.memory}" if fix.memory else ""
    return (
        f"{fix.cause}{memory}: {signed_percent(fix.gain)} on the step, {seconds(fix.present_step_s)} ->"
        f" {seconds(fix.predicted_step_s)} predicted"
    )


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


# --- a comparison


def render_comparison(comparison: Comparison) -> RenderableType:
    """What was predicted, what came, and each symptom before and after."""
    before, after = comparison.before, comparison.after
    facts = _table("", "before", "after")
    facts.add_row("job", before.name, after.name)
    facts.add_row("step", seconds(before.step_s), seconds(after.step_s))
    if before.tokens or after.tokens:
        facts.add_row(
            "tokens of a step", *(f"{one.tokens:,.0f}" if one.tokens else "unknown" for one in (before, after))
        )
    facts.add_row("S", ratio(before.slowdown), ratio(after.slowdown))
    for cause in dict.fromkeys((*before.causes, *after.causes)):
        shares = (one.causes.get(cause, 0.0) * (one.slowdown - 1) for one in (before, after))
        facts.add_row(f"lost to {printable(cause)}", *(f"{percent(share)} of an ideal step" for share in shares))
    symptoms = _table("Symptom", "before", "after", "")
    for change in comparison.changes:
        symptoms.add_row(
            printable(change.symptom), answer(change.before), answer(change.after), Text(change.name, change.style)
        )
    lines = [Text(line, "bold") for line in comparison.sentences()]
    return Group(*lines, Text(""), facts, Text(""), symptoms)
