"""`megatron-balance plan`: from the command line to what is printed and written.

Only what reads the job is imported with this file: compiled code and pictures wait until the command line is known to be good.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.costs.devices import Device, device_chosen, device_named
from megatron_balance.errors import BalanceError
from megatron_balance.files import check_place, write_standard_output, write_text
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.planning.flags import (
    ANALYTIC,
    ANY,
    FLAG,
    LAST,
    PROFILE,
    MemoryWish,
    add_memory_arguments,
    layer_weight,
    memory_wish,
)
from megatron_balance.planning.formats import FORMATS
from megatron_balance.planning.timeline import check_timeline_file

if TYPE_CHECKING:
    from megatron_balance.costs.chain import ChainCosts
    from megatron_balance.planning.job import Job
    from megatron_balance.planning.report import Report
    from megatron_balance.planning.study import Judge

_STDOUT = ""
_DEVICE = "generic"
_MOST_MICROBATCHES = 2**20  # of a step, each of whose passes is simulated
_MOST_LAYERS = 1000  # comparing all first and last counts takes seconds beyond


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; all others are Megatron's."""
    parser.add_argument(
        "--hf-config",
        metavar="FILE",
        help="take the model from a Hugging Face config.json; Megatron's flags outrank it",
    )
    parser.add_argument(
        "--num-microbatches",
        type=int,
        metavar="M",
        help="of a step (default: from --global-batch-size and the number of processes)",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="processes of the job (default: what torchrun's flags say)"
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="show this layout beside the plan; may be repeated",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="megatron", help="how the layout is printed (default: %(default)s)"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write the plan as JSON to FILE, which ends in .json, or to standard output and nothing else there",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw the simulated step: .png (needs matplotlib) or .json (for ui.perfetto.dev)",
    )
    parser.add_argument(
        "--mtp-placement",
        f"{FLAG}-mtp-placement",
        choices=(ANY, LAST),
        default=ANY,
        help="where multi-token prediction may stand: any stage that Megatron 0.16 and newer takes, or the last stage, as 0.14 and"
        " 0.15 want it (default: %(default)s)",
    )
    add_memory_arguments(parser)
    parser.add_argument(
        f"{FLAG}-costs",
        metavar="analytic|FILE|DIR",
        help="estimates from data sheets (default), a costs file that `megatron-balance profile` wrote, or the folder of a trace"
        " that --straggler-trace recorded",
    )
    parser.add_argument(
        f"{FLAG}-device",
        metavar="NAME",
        help="whose speeds, memory and link are taken: A100, H100, H200, B200, generic (a GPU), cpu, also with speeds of its own"
        " (H100,tflops=700,tbps=3); default: generic speeds, and no memory limit",
    )
    for name in ("embedding", "head"):
        parser.add_argument(
            f"{FLAG}-{name}-weight", metavar="W|FWD,BWD", help=f"cost of the {name} in layers, instead of the estimate"
        )


def plan(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        options: the flags of `add_arguments`.
        argv: the rest of the command line, Megatron's.

    Raises:
        BalanceError: the user's mistake.
    """
    wish = memory_wish(options.balanced_pipeline_memory_gb, options.balanced_pipeline_memory_like)
    _check_files(options)
    device = None if options.balanced_pipeline_device is None else device_chosen(options.balanced_pipeline_device)
    for text in options.compare:
        parse_layout(text)

    from megatron_balance.planning.job import read_job

    job = read_job(argv, options.hf_config, options.num_microbatches, options.world_size)
    _check_topology(job)
    say = functools.partial(print, file=sys.stderr, flush=True)
    if job.ignored:
        say(f"megatron-balance: without effect on a plan: {' '.join(job.ignored)}")
    costs, p2p_s = _costs(options, job, device)
    report, judge = _report(options, job, costs, p2p_s, wish, device, lambda text: say(f"megatron-balance: {text}"))
    _show(options, report)
    if options.timeline is not None:
        _draw(options.timeline, report, judge)
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Refuse names before anything is computed; a script behind --json must not be taken for its FILE."""
    if options.json not in (None, _STDOUT) and not options.json.endswith(".json"):
        raise BalanceError(
            f"--json {options.json}: end the file's name in .json, or put --json before another flag for standard output"
        )
    if options.timeline is not None:
        check_timeline_file(options.timeline)
    if options.json and options.timeline and os.path.realpath(options.json) == os.path.realpath(options.timeline):
        raise BalanceError(f"--json and --timeline both name {options.json}: they are two files")
    picture = (options.timeline or "").endswith(".png")
    for flag, path, begins in (
        ("--json", options.json, b'{\n  "layout"'),
        ("--timeline", options.timeline, b"\x89PNG" if picture else b'{"traceEvents"'),
    ):
        if path:
            check_place(flag, Path(path), begins)


def _check_topology(job: Job) -> None:
    from megatron_balance.pipeline.chain import check_stages
    from megatron_balance.schedule.order import check_schedule

    if job.model.num_layers > _MOST_LAYERS:
        raise BalanceError(f"the model has {job.model.num_layers} layers: at most {_MOST_LAYERS} are planned")
    if job.topology.num_microbatches > _MOST_MICROBATCHES:
        raise BalanceError(
            f"a step has {job.topology.num_microbatches} micro-batches: at most {_MOST_MICROBATCHES} are planned; give"
            " --num-microbatches M, whose shares of the step hardly change beyond"
        )
    check_schedule(job.topology)
    check_stages(job.model.num_layers, job.topology.num_stages)


def _costs(options: argparse.Namespace, job: Job, device: Device | None) -> tuple[ChainCosts, float]:
    """Costs of the elements, and seconds of a transfer between stages, by the link of the device that the costs are of."""
    from megatron_balance.costs.analytic import analytic_table
    from megatron_balance.costs.transfer import transfer_s
    from megatron_balance.planning.costs import given_costs

    source = options.balanced_pipeline_costs
    if source == PROFILE:
        raise BalanceError(
            f"plan measures nothing: run `megatron-balance profile --output costs.json ...`, then give {FLAG}-costs costs.json"
        )
    if source in (None, ANALYTIC):
        table = analytic_table(job.model, job.topology, device or device_chosen(_DEVICE))
    else:
        table = given_costs(source, job.model, job.topology)
    weights = [
        layer_weight(f"{FLAG}-{name}-weight", getattr(options, f"balanced_pipeline_{name}_weight"))
        for name in ("embedding", "head")
    ]
    costs = table.chain(job.model, job.topology).with_weights(*weights)
    return costs, transfer_s(job.model, job.topology, device or device_named(table.device))


def _report(
    options: argparse.Namespace,
    job: Job,
    costs: ChainCosts,
    p2p_s: float,
    wish: MemoryWish,
    device: Device | None,
    say: Callable[[str], None],
) -> tuple[Report, Judge]:
    from megatron_balance.pipeline import stock
    from megatron_balance.planning.planner import plan_job
    from megatron_balance.planning.report import Report
    from megatron_balance.planning.study import Judge, alternatives, best_rival, sensitivity
    from megatron_balance.schedule.simulate import Simulator

    by_pattern = job.pattern is not None
    mtp_last = options.mtp_placement == LAST or by_pattern
    apart = job.model.mtp_num_layers and not mtp_last
    own = job.own_split if job.has_own_split else None
    say(f"planning {job.topology.num_stages} stages on costs {costs.source} ...")
    planned = plan_job(
        costs,
        job.model,
        job.topology,
        job.arguments,
        job.model.fingerprint,
        wish=wish,
        device=device,
        mtp_stages=stock.mtp_stages(job.topology, by_pattern) if apart else None,
        allow_empty=stock.may_leave_empty(job.topology, by_pattern),
        starts=_starts(options, job, mtp_last),
        p2p_s=p2p_s,
        say=say,
        asks_more=True,
    )
    judge = Judge(costs, Simulator(job.topology, p2p_s), planned.memory, planned.plan.limit_bytes)
    found = alternatives(
        judge,
        job.model.mtp_num_layers,
        own,
        options.compare,
        mtp_last=mtp_last,
        by_pattern=by_pattern,
    )
    rival = best_rival(found, options.compare)
    chosen = planned.plan.split
    report = Report(job, costs.head.total_s, planned, tuple(found), rival, tuple(sensitivity(judge, chosen, rival)))
    return report, judge


def _starts(options: argparse.Namespace, job: Job, mtp_last: bool) -> list[tuple[int, ...]]:
    """The job's own split and those to compare, where Megatron takes them: the plan is then never worse."""
    from megatron_balance.pipeline import stock

    finders = [job.own_split] if job.has_own_split else []
    finders += [functools.partial(parse_layout, text) for text in options.compare]
    splits = []
    for find in finders:
        with contextlib.suppress(BalanceError):
            layout = find()
            stock.check_layout(layout, job.model.num_layers, job.model.mtp_num_layers, job.topology, mtp_last)
            splits.append(layout.layers)
    return splits


def _show(options: argparse.Namespace, report: Report) -> None:
    if options.json is None:
        _print_text(options, report)
        return
    text = json.dumps(report.values(), indent=2, allow_nan=False) + "\n"
    if options.json == _STDOUT:
        write_standard_output(text)
        return
    _print_text(options, report)
    write_text(options.json, text, f"the plan {options.json}")


def _print_text(options: argparse.Namespace, report: Report) -> None:
    from megatron_balance.planning.text import render_report

    write_standard_output(render_report(report, options.format) + "\n")


def _draw(path: str, report: Report, judge: Judge) -> None:
    from megatron_balance.planning.timeline import draw_timeline

    splits = {"plan": report.plan.split}
    uniform = report.alternatives[0]
    if uniform.legal:
        splits = {"uniform": uniform.layout, **splits}
    draw_timeline(path, {name: judge.timeline(layout) for name, layout in splits.items()})
