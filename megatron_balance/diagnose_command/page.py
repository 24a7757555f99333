"""The report as one HTML file that opens offline: it asks nothing of the network, and is told by its policy not to."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from megatron_balance.diagnose_command.report import LEAST_DARKEST, Report, finite, hours, printable, ratio
from megatron_balance.diagnose_command.timeline import IDEAL, REAL, StepTimeline, step_timelines
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import NO, YES, Check, Fix
from megatron_balance.diagnosis.trace import BACKWARD, COMBINED, FORWARD
from megatron_balance.figures import percent, seconds, signed_percent

MOST_OPERATIONS = 120_000  # drawn operations in a file: about 2.5 MB
_MOST_DP_RANKS = 16
_FEW_DP_RANKS = 8  # whose heatmap takes half of the page's width
_ANSWERS = {YES: ("yes", "\u25cf yes"), NO: ("no", "\u25cb no")}


def page(report: Report, replay: Replay) -> str:
    """The file's text.

    Args:
        report: what was found.
        replay: of its trace.
    """
    style, script = _asset("page.css"), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        script_hash=_digest(script),
        style_hash=_digest(style),
        title=_escaped(f"{report.name}: {' and '.join(report.diagnosis.verdict)}"),
        style=style,
        job=_escaped(f"{report.name}: {report.sizes}"),
        headline=_escaped(report.headline),
        problems=_problems(report),
        tiles="".join(_tiles(report)),
        causes=_causes(report),
        stages=_stages(report),
        checklist="".join(_checklist(report)),
        fixes="".join(map(_fix, report.diagnosis.fixes)) or "<p>Nothing that a flag could change was found.</p>",
        wide="wide" if report.diagnosis.slowdown.by_worker.shape[1] > _FEW_DP_RANKS else "",
        data=_embedded(_data(report, replay)),
        script=script,
    )


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a Content-Security-Policy names the one inline script or style that may be used."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _embedded(values: Any) -> str:
    """JSON that cannot end the element that it stands in, nor begin another."""
    text = json.dumps(finite(values), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- tables, which need no script


def _problems(report: Report) -> str:
    lines = "".join(f"<li>{_escaped(problem)}</li>" for problem in report.trace.problems)
    return f'<div class="problems"><b>Partial</b><ul>{lines}</ul></div>' if lines else ""


def _tiles(report: Report) -> Iterator[str]:
    found, slowdown = report.diagnosis, report.diagnosis.slowdown
    known = {name: one for name, one in slowdown.by_operation.items() if np.isfinite(one)}
    yield _tile(ratio(slowdown.slowdown), "slowdown S: step over ideal step")
    yield _tile(seconds(report.step_s), "a step; ideal " + seconds(float(slowdown.ideal_s.mean())))
    yield _tile(hours(found.waste_per_day_gpu_hours), "GPU-hours wasted a day")
    yield _tile(percent(slowdown.last_stage, 0), "goes with the last stage (M_S)")
    yield _tile(percent(slowdown.slowest_workers, 0), "goes with the slowest 3 % of workers (M_W)")
    if known:
        worst = max(known, key=lambda name: known[name])
        yield _tile(ratio(known[worst]), f"if only {worst} were as recorded (S_t)")


def _tile(figure: str, words: str) -> str:
    return f"<li><b>{_escaped(figure)}</b>{_escaped(words)}</li>"


def _causes(report: Report) -> str:
    shares = sorted(report.diagnosis.causes.items(), key=lambda one: -one[1])
    rows = [(name, share, "cause") for name, share in shares] + [("no name", report.unnamed, "rest")]
    alone = {name: signed_percent(one - 1) for name, one in report.diagnosis.by_cause.items() if np.isfinite(one)}
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("cause", "share", "gain without it", ""))
    lines = "".join(
        f'<tr><th scope="row">{_escaped(name)}</th><td class="number">{percent(share)}</td>'
        f'<td class="number">{alone.get(name, "")}</td><td>{_bars([(share, kind)])}</td></tr>'
        for name, share, kind in rows
    )
    return f'<table class="causes"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'


def _stages(report: Report) -> str:
    stage_s, most_s = report.stage_s, float(np.nanmax(np.nansum(report.stage_s, axis=0), initial=0.0))
    lines = []
    for stage, (forward_s, backward_s) in enumerate(stage_s.T.tolist()):
        bars = [
            (np.nan_to_num(forward_s) / (most_s or 1), "forward"),
            (np.nan_to_num(backward_s) / (most_s or 1), "backward"),
        ]
        lines.append(
            f'<tr><th scope="row">{stage}</th><td class="number">{seconds(forward_s)}</td><td class="number">{seconds(backward_s)}'
            f"</td><td>{_bars(bars)}</td></tr>"
        )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("stage", "forward", "backward", "both"))
    return f'<table class="stages"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _bars(parts: Sequence[tuple[float, str]]) -> str:
    """Bars one after the other, each with its share of the whole width."""
    drawn, left = [], 0.0
    for share, kind in parts:
        width = 100 * min(max(float(share) if np.isfinite(share) else 0.0, 0.0), 1.0)
        drawn.append(f'<rect class="{kind}" x="{left:.2f}" width="{width:.2f}" height="10"/>')
        left += width
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'


def _checklist(report: Report) -> Iterator[str]:
    checks = report.diagnosis.checklist
    if not checks:
        yield "<p>Nothing was checked.</p>"
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("symptom", "there?", "measured", "yes where"))
    for cause in dict.fromkeys(check.cause for check in checks):
        rows = "".join(_check(check) for check in checks if check.cause == cause)
        yield f"<h3>{_escaped(cause)}</h3>"
        yield f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _check(check: Check) -> str:
    kind, word = _ANSWERS.get(check.answer, ("unknown", f"\u2013 {check.answer}"))
    return (
        f'<tr><td>{_escaped(check.symptom)}</td><td class="answer {kind}">{_escaped(word)}</td>'
        f"<td>{_escaped(check.measured)}</td><td>{_escaped(check.threshold)}</td></tr>"
    )


def _fix(fix: Fix) -> str:
    memory = f", {fix.memory}" if fix.memory else ""
    flags = f"<pre>{_escaped(' '.join(fix.flags))}</pre>" if fix.flags else ""
    note = f'<p class="faint">{_escaped(fix.note)}</p>' if fix.note else ""
    step = f"{seconds(fix.present_step_s)} to {seconds(fix.predicted_step_s)} a step, predicted"
    return (
        f'<div class="fix"><p><span class="gain">{signed_percent(fix.gain)}</span> {_escaped(fix.cause + memory)}: {step}</p>'
        f"{flags}{note}</div>"
    )


# --- what the pictures are drawn from


def drawn(report: Report, operations_per_worker: int) -> tuple[list[int], np.ndarray]:
    """Numbers of the steps whose timelines are drawn, and of the data-parallel ranks.

    All where they are few; otherwise the typical step, the slowest and others between, and the ranks from the slowest to the
    fastest, so that a file of a thousand ranks still opens at once.
    """
    slowdown = report.diagnosis.slowdown
    stages, dp_size = slowdown.by_worker.shape
    dp_order = np.argsort(-np.nan_to_num(slowdown.by_dp_rank), kind="stable")
    each = 2 * stages * max(operations_per_worker, 1)
    all_fit = each * dp_size * slowdown.steps.size <= MOST_OPERATIONS
    dp_ranks = dp_order if all_fit else dp_order[_spread(dp_size, _MOST_DP_RANKS)]
    fitting = max(1, MOST_OPERATIONS // (each * dp_ranks.size))
    by_slowness = np.argsort(-(slowdown.actual_s / slowdown.ideal_s), kind="stable")
    chosen = slowdown.steps[by_slowness[_spread(by_slowness.size, fitting)]].tolist()
    if report.typical_step not in chosen:
        chosen[-1] = report.typical_step
    return sorted(chosen), np.sort(dp_ranks)


def _spread(size: int, most: int) -> np.ndarray:
    """At most ``most`` places of ``size``, from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def _data(report: Report, replay: Replay) -> dict[str, Any]:
    slowdown, kinds = report.diagnosis.slowdown, [printable(kind) for kind in report.trace.kinds]
    groups = {FORWARD: 0, BACKWARD: 1, COMBINED: 1}
    stages, dp_size = slowdown.by_worker.shape
    steps, dp_ranks = drawn(report, -(-replay.nodes.kind.size // stages))
    dp_ranks = dp_ranks[np.isin(dp_ranks, replay.lanes)]
    return {
        "pp": stages,
        "dp": dp_size,
        "kinds": kinds,
        "groups": [groups.get(kind, 2) for kind in report.trace.kinds],
        "steps": slowdown.steps.tolist(),
        "typical": report.typical_step,
        "actual": _rounded(slowdown.actual_s, 6),
        "ideal": _rounded(slowdown.ideal_s, 6),
        "workers": _rounded(slowdown.by_worker.ravel(), 4),
        "least_darkest": LEAST_DARKEST,
        "by_step": [_rounded(each.ravel(), 3) for each in slowdown.by_worker_per_step],
        "timelines": {str(step): _timeline(step_timelines(replay, step), dp_ranks, stages) for step in steps},
    }


def _rounded(values: np.ndarray, places: int) -> list[float]:
    return np.round(values, places).tolist()


def _timeline(both: Mapping[str, StepTimeline], dp_ranks: np.ndarray, stages: int) -> dict[str, Any]:
    last = both[REAL].last_dp_rank
    if last not in dp_ranks:
        dp_ranks = np.sort(np.append(dp_ranks[:-1], last))
    shown: dict[str, Any] = {"dp_ranks": dp_ranks.tolist(), "last": last}
    for name in (REAL, IDEAL):
        shown[name] = [_rows(both[name], int(dp_rank), stages) for dp_rank in dp_ranks]
        shown[f"{name}_s"] = round(both[name].step_s, 6)
    return shown


def _rows(timeline: StepTimeline, dp_rank: int, stages: int) -> list[list[int]]:
    """By pipeline rank: kind, micro-batch, start and length in microseconds of each operation, one after the other.

    Communication begins when its last peer has. It comes first, so that the passes that hide it are drawn over it.
    """
    mine = timeline.only((timeline.dp_rank == dp_rank) & ~timeline.transfers)
    columns = (
        mine.kind,
        mine.microbatch,
        np.round(1e6 * (mine.end_s - mine.working_s)),
        np.round(1e6 * mine.working_s),
    )
    table = np.stack([column.astype(np.int64) for column in columns], axis=1)
    order = np.lexsort((mine.start_s, mine.computes))
    table, pp_rank = table[order], mine.pp_rank[order]
    return [table[pp_rank == stage].ravel().tolist() for stage in range(stages)]
