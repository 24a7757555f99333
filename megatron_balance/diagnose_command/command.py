"""`megatron-balance diagnose`: from the command line to what is printed and written.

Only what reads the command line is imported with this file: replay and pictures wait until it is known to be good.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.errors import BalanceError
from megatron_balance.files import check_place, write_standard_output, write_text
from megatron_balance.plots import check_matplotlib

if TYPE_CHECKING:
    from megatron_balance.diagnose_command.comparison import Comparison, Summary
    from megatron_balance.diagnose_command.report import Report
    from megatron_balance.diagnosis.replay import Replay

_STDOUT = ""
_OUTPUTS = {  # flag: how the name ends, and how a file begins that this flag wrote and may write again
    "json": (".json", b"{\n"),
    "html": (".html", b"<!doctype html>"),
    "picture": (".png", b"\x89PNG"),
    "timeline": (".json", b'{"traceEvents"'),
    "costs": (".json", b"{\n"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a .parquet file, or a folder with one a rank")
    parser.add_argument(
        "--meta",
        action="append",
        default=[],
        metavar="FILE.yaml",
        help="sizes of the job (dp_size, pp_size, vpp_size, world_size), where neither the trace nor its folder has them; with"
        " --before and --after once for both, or twice, in this order",
    )
    parser.add_argument(
        "--layers",
        action="append",
        default=[],
        metavar="N,N,...",
        help="transformer layers of each stage, stage 0 first (9,9,9,9), where the trace does not tell them: what a new split"
        " is reckoned from; with --before and --after once for the first, or twice, in this order",
    )
    compare = parser.add_argument_group("comparison, in place of TRACE")
    compare.add_argument("--before", metavar="A", help="a trace, or the .json of a report, from before a change")
    compare.add_argument(
        "--after", metavar="B", help="the same from after it: which symptoms went, and what came of the promise"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write the report as JSON to FILE, which ends in .json, or to standard output and nothing else there",
    )
    output.add_argument("--html", metavar="FILE.html", help="write it as one page that opens offline")
    output.add_argument("--picture", metavar="FILE.png", help="draw it (needs matplotlib)")
    output.add_argument(
        "--timeline",
        metavar="FILE.json",
        help="write one step, real and ideal, for ui.perfetto.dev or chrome://tracing",
    )
    output.add_argument(
        "--step", type=int, metavar="N", help="of --timeline and --picture (default: the one of median slowdown)"
    )
    output.add_argument(
        "--costs",
        metavar="FILE.json",
        help="write what layers and head cost in this job, for `plan` and training (--balanced-pipeline-costs); needs"
        " --layers where the trace does not tell them",
    )


def diagnose(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
        BalanceError: the user's mistake.
    """
    _check(options)
    layers = [*map(_layers, options.layers), None, None]
    if options.before is not None:
        return _compare(options, layers)
    found = _examined(options.trace, options.meta[0] if options.meta else None, layers[0])
    if options.costs is not None and found.layers is None:
        raise BalanceError("--costs needs --layers, the transformer layers of each stage: --layers 9,9,9,9")
    step = _step(options.step, found.report)
    _write_files(options, found, step)
    _show(options, found.report)
    return 0


# --- what is asked


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be before anything is read."""
    if (options.before is None) != (options.after is None):
        raise BalanceError("--before and --after go together: name a trace or a report for each")
    if (options.trace is None) == (options.before is None):
        raise BalanceError("name one TRACE (a .parquet file, or a folder of them), or --before A --after B")
    most = 1 if options.before is None else 2
    for flag, values in (("--meta", options.meta), ("--layers", options.layers)):
        if len(values) > most:
            raise BalanceError(f"{flag} is given {len(values)} times, for {most} trace{'s' * (most > 1)}")
    given = {flag: getattr(options, flag) for flag in _OUTPUTS if getattr(options, flag) not in (None, _STDOUT)}
    if options.before is not None and (only := sorted({*given} - {"json"})):
        raise BalanceError(f"--{only[0]} is of one trace: leave out --before and --after")
    if options.step is not None and options.timeline is None and options.picture is None:
        raise BalanceError("--step is for --timeline and --picture: name one of them")
    for flag, path in given.items():
        _check_place(flag, path)
    places = [os.path.realpath(path) for path in given.values()]
    if len({*places}) < len(places):
        raise BalanceError(f"{' and '.join(f'--{flag}' for flag in given)}: two of them name the same file")
    if options.picture is not None:
        check_matplotlib("--picture")


def _check_place(flag: str, path: str) -> None:
    ending, begins = _OUTPUTS[flag]
    if not path.endswith(ending):
        raise BalanceError(f"--{flag} {path}: end the file's name in {ending}")
    check_place(f"--{flag}", Path(path), begins)


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise BalanceError(f"--layers {text}: give the layers of each stage, with commas between (9,9,9,9)")
    return tuple(map(int, parts))


def _step(wanted: int | None, report: Report) -> int:
    steps = report.diagnosis.slowdown.steps.tolist()
    if wanted is not None and wanted not in steps:
        raise BalanceError(f"--step {wanted} is not in the trace: it has {len(steps)} steps, {steps[0]} to {steps[-1]}")
    return report.typical_step if wanted is None else wanted


# --- what is found


@dataclass(frozen=True, eq=False)
class _Found:
    report: Report
    replay: Replay
    layers: tuple[int, ...] | None


def _examined(path: str, meta: str | None, layers: tuple[int, ...] | None) -> _Found:
    from megatron_balance.diagnose_command.report import Report
    from megatron_balance.diagnosis.diagnose import diagnose
    from megatron_balance.diagnosis.reading import read_trace
    from megatron_balance.diagnosis.replay import Replay
    from megatron_balance.diagnosis.whatif import slowdown_of
    from megatron_balance.reporting import progress

    with progress(f"diagnosing {path}", 4) as advance:
        trace = read_trace(path, meta)
        advance(1)
        layers = trace.job.layers if layers is None else layers
        _check_layers(layers, trace.job.topology.num_stages)
        replay = Replay(trace)
        advance(1)
        slowdown = slowdown_of(trace, replay)
        advance(1)
        found = diagnose(trace, slowdown, replay=replay, layers=layers)
        advance(1)
    return _Found(Report(trace, found), replay, layers)


def _check_layers(layers: tuple[int, ...] | None, stages: int) -> None:
    if layers is not None and len(layers) != stages:
        raise BalanceError(f"--layers names {len(layers)} stages, the trace has {stages}: give a number for each")


def _compare(options: argparse.Namespace, layers: Sequence[tuple[int, ...] | None]) -> int:
    from megatron_balance.diagnose_command.comparison import Comparison

    metas = (options.meta * 2)[:2] if len(options.meta) == 1 else options.meta or [None, None]
    before, after = (_summary(*one) for one in zip((options.before, options.after), metas, layers[:2], strict=True))
    _show(options, Comparison(before, after))
    return 0


def _summary(path: str, meta: str | None, layers: tuple[int, ...] | None) -> Summary:
    from megatron_balance.diagnose_command.comparison import read_summary, summary_of

    return read_summary(path) if path.endswith(".json") else summary_of(_examined(path, meta, layers).report)


# --- what is shown


def _write_files(options: argparse.Namespace, found: _Found, step: int) -> None:
    if options.costs is not None and found.layers is not None:
        from megatron_balance.costs.table import save_costs
        from megatron_balance.diagnosis.diagnose import recorded_split

        save_costs(options.costs, recorded_split(found.report.trace, found.layers, found.replay).table())
    if options.html is not None:
        from megatron_balance.diagnose_command.page import page

        write_text(options.html, page(found.report, found.replay), f"the page {options.html}")
    if options.timeline is None and options.picture is None:
        return
    from megatron_balance.diagnose_command.timeline import perfetto, step_timelines

    timelines = step_timelines(found.replay, step)
    if options.timeline is not None:
        write_text(options.timeline, perfetto(timelines, found.report.name), f"the timeline {options.timeline}")
    if options.picture is not None:
        from megatron_balance.diagnose_command.picture import picture

        write_text(options.picture, picture(found.report, timelines), f"the picture {options.picture}")


def _show(options: argparse.Namespace, shown: Report | Comparison) -> None:
    text = "" if options.json is None else json.dumps(shown.values(), indent=2, allow_nan=False) + "\n"
    if options.json == _STDOUT:
        write_standard_output(text)
        return
    if text:
        write_text(options.json, text, f"the report {options.json}")
    from megatron_balance.diagnose_command.report import Report
    from megatron_balance.diagnose_command.text import render_comparison, render_report, terminal_text

    rendered = render_report(shown) if isinstance(shown, Report) else render_comparison(shown)
    write_standard_output(terminal_text(rendered))
