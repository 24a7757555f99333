#!/usr/bin/env python3
"""What `--varlen-packing` costs and gains in real training: Megatron on the CPU, one core a rank, real text.

1. Overhead: one job trains each of its batches twice, with our forward step and with Megatron's own on the same tokens and
   bounds (inter-document masking), under the same attention.
2. Gain: stock inter-document masking and packing train on the same corpus in turns, a step each; labels learned a second, and
   beside it what the simulator says of the same batches on costs measured on this machine.

The documents are the source files of Python's standard library, or the functions and classes in them. Two cores are needed,
and a quiet machine: about 25 minutes. Exits with 1 if a target is missed.

    python scripts/bench/packed_training.py [--quick] [--only TEXT] [--markdown] [--script PRETRAIN_GPT] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "scripts")
for path in map(str, PATHS):  # run from a checkout that is not installed
    if path not in sys.path:
        sys.path.insert(0, path)

from packed_figures import Gain, Median, Overhead, Predictor, read_side  # noqa: E402
from packed_jobs import DEFINITIONS, FILES, PACKED, STOCK, Case, Launcher, corpus, environment  # noqa: E402
from quickstart.launch import LaunchFailed  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_balance.megatron.measuring.launch import MeasurementFailed, measure  # noqa: E402

OVERHEAD = Case("one rank", DEFINITIONS, 2048, pipeline=1, data=1, microbatches=2, pairs=200)
GAINS = (
    Case("functions, PP2", DEFINITIONS, 4096, pipeline=2, data=1, microbatches=16, pairs=20),
    Case("functions, DP2", DEFINITIONS, 4096, pipeline=1, data=2, microbatches=4, pairs=40),
    Case("files, PP2", FILES, 1024, pipeline=2, data=1, microbatches=8, pairs=40),
    Case("files, DP2", FILES, 1024, pipeline=1, data=2, microbatches=4, pairs=40),
)
# Targets.
LOADER_SHARE = 0.01
STEP = 1.01
PREDICTION = 0.10
LOSS = 2e-6
CORPUS_TOKENS = 1_600_000

HEADINGS = (
    "documents, ranks", "bin", "bins a step", "steps", "stock waits", "packed waits", "fill", "work a label",
    "stock, s", "packed, s", "predicted", "measured", "95 %", "measured in all", "off", "",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ.update(environment(PATHS))
    console = Console(stderr=options.markdown, highlight=False)
    chosen = [case for case in GAINS if options.only.lower() in case.name.lower()]
    with_overhead = options.only.lower() in OVERHEAD.name
    try:
        overhead = _overhead(_sized(OVERHEAD, options.quick), options, console) if with_overhead else None
        gains = [_gain(_sized(case, options.quick), options, console) for case in chosen]
    except (LaunchFailed, MeasurementFailed) as failure:
        console.print(str(failure), markup=False, soft_wrap=True)
        return 2
    remarks = []
    if overhead:
        rows = _overhead_rows(overhead)
        remarks += [remark for *_, remark in rows if remark]
        _show(("overhead", "target", "measured", "95 %", ""), rows, options.markdown)
        print(
            f"{overhead.steps} batches, {overhead.step_s:.2f} s a step; losses differ by {overhead.loss_difference:.0e} at most"
        )
    if gains:
        rows = [_gain_row(gain) for gain in gains]
        remarks += [remark for *_, remark in rows if remark]
        _show(HEADINGS, rows, options.markdown)
    console.print(f"{len(remarks)} targets missed" if remarks else "all targets reached")
    return 1 if remarks else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n    python")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps: whether it runs, not a figure to quote")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has TEXT in its name")
    parser.add_argument("--markdown", action="store_true", help="tables for the README on standard output")
    parser.add_argument(
        "--script", help="a checkout's pretrain_gpt.py (default: our own of the installed megatron-core)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "packed-bench-out", help="folder for corpora and logs")
    return parser


def _sized(case: Case, quick: bool) -> Case:
    return case.with_pairs(max(4, case.pairs // 10)) if quick else case


def _launcher(case: Case, options: argparse.Namespace) -> Launcher:
    out = options.out.resolve() / case.name.replace(", ", "-").replace(" ", "-")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return Launcher(case, out, options.script)


def _overhead(case: Case, options: argparse.Namespace, console: Console) -> Overhead:
    launcher = _launcher(case, options)
    with console.status("overhead", refresh_per_second=1) as status:
        data = corpus(case, CORPUS_TOKENS, options.out.resolve(), status.update)
        launcher.alternate(data.prefix, lambda text: status.update(f"overhead: {text}"))
    return Overhead.read(launcher.seen)


def _gain(case: Case, options: argparse.Namespace, console: Console) -> Gain:
    launcher = _launcher(case, options)
    with console.status(case.name, refresh_per_second=1) as status:
        data = corpus(case, CORPUS_TOKENS, options.out.resolve(), status.update)
        status.update(f"{case.name}: measuring costs")
        flags = case.flags(PACKED)
        table = measure(options.script, flags, "cpu", case.data)
        launcher.compare(data.prefix, _order(case.steps), lambda text: status.update(f"{case.name}: {text}"))
    predictor = Predictor.of(case, table, flags)
    return Gain(case, *(read_side(launcher.seen / side, case, predictor) for side in (STOCK, PACKED)))


def _order(steps: int) -> list[str]:
    """Stock, packed, packed, stock, ...: a machine that gets slower or faster steadily favours neither."""
    return [side for pair in range(steps) for side in ((STOCK, PACKED), (PACKED, STOCK))[pair % 2]]


def _overhead_rows(overhead: Overhead) -> list[tuple[str, ...]]:
    share, step = overhead.loader_share, overhead.step
    same = "" if overhead.loss_difference <= LOSS else "LOSSES DIFFER"
    return [
        (
            "loader's share of the step", f"< {LOADER_SHARE:.0%}", f"{share.value:.2%}",
            f"{share.low:.2%} to {share.high:.2%}", "" if share.value < LOADER_SHARE else "MISSED",
        ),
        (
            "our step over Megatron's", f"< {STEP:.2f}", f"{step.value:.4f}",
            _interval(step, 4), same or ("" if step.value < STEP else "MISSED"),
        ),
        ("our loader and step over its step alone", "", f"{overhead.whole.value:.4f}", _interval(overhead.whole, 4), ""),
    ]  # fmt: skip


def _gain_row(gain: Gain) -> tuple[str, ...]:
    case, measured = gain.case, gain.measured
    off = gain.predicted / measured.value - 1
    bins = case.data * case.microbatches
    return (
        case.name, str(case.sequence), str(bins), str(case.pairs), f"{gain.stock.waiting:.3f}",
        f"{gain.packed.waiting:.3f}", f"{gain.fill:.1%}", f"{gain.work:.3f}", _seconds(gain.stock.step_s),
        _seconds(gain.packed.step_s), f"{gain.predicted:.3f}", f"{measured.value:.3f}", _interval(measured, 3),
        f"{gain.measured_in_all:.3f} ({gain.predicted_in_all:.3f})", f"{off:+.1%}",
        "" if abs(off) <= PREDICTION else "MISSED",
    )  # fmt: skip


def _seconds(values) -> str:
    return f"{Median.of(values).value:.2f}"


def _interval(figure: Median, digits: int) -> str:
    return f"{figure.low:.{digits}f} to {figure.high:.{digits}f}"


def _show(headings: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    columns = len(headings) - (not any(row[-1] for row in rows))
    if markdown:
        print("| " + " | ".join(headings[:columns]) + " |")
        print("|" + "---|" * columns)
        for row in rows:
            print("| " + " | ".join(row[:columns]) + " |")
        print()
        return
    table = Table()
    for heading in headings[:columns]:
        table.add_column(heading, justify="right" if heading != headings[0] else "left", overflow="fold")
    for row in rows:
        table.add_row(*row[:columns])
    Console(highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
