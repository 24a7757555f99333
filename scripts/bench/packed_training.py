#!/usr/bin/env python3
"""What `--varlen-packing` costs and gains in real training: Megatron on the CPU, one core a rank, real text.

1. Overhead: one job trains each of its batches twice, with our forward step and with Megatron's own on the same tokens and
   bounds (inter-document masking), under the same attention.
2. Gain: stock inter-document masking and packing train on the same corpus in turns, a step each; labels learned a second, and
   beside it what the simulator says of the same batches on costs measured on this machine.

The documents are the source files of Python's standard library, the functions and classes in them, or both: the long files
and the functions of the others. Two cores are needed, and a quiet machine: about 40 minutes. Exits with 1 if a target is missed.

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
from packed_jobs import DEFINITIONS, FILES, MIXED, PACKED, STOCK, Case, Launcher, corpus, environment  # noqa: E402
from quickstart.launch import LaunchFailed  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_balance.megatron.measuring.launch import MeasurementFailed, measure  # noqa: E402

OVERHEAD = Case("one rank", DEFINITIONS, 2048, pipeline=1, data=1, microbatches=2, pairs=200)
GAINS = (
    Case("mixed, PP2", MIXED, 8192, pipeline=2, data=1, microbatches=8, pairs=30),
    Case("mixed, DP2", MIXED, 8192, pipeline=1, data=2, microbatches=4, pairs=30),
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

ROWS = (
    "model, vocabulary",
    "a step",
    "step over one without waiting, simulated: stock, packed",
    "places of the bins that hold a label, packed",
    "work a label, packed over stock, simulated",
    "the loader's share of the step: stock, packed",
    "seconds a step: stock, packed (medians)",
    "labels a second, packed over stock: predicted",
    "measured (median of pairs of steps)",
    "95 % (pairs)",
    "prediction off by",
    "in all steps together: predicted, measured",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ.update(environment(PATHS))
    console = Console(stderr=options.markdown, highlight=False)
    chosen = [case for case in GAINS if options.only.lower() in case.name.lower()]
    with_overhead = options.only.lower() in OVERHEAD.name
    try:
        overhead = _overhead(_sized(OVERHEAD, options), options, console) if with_overhead else None
        gains = [_gain(_sized(case, options), options, console) for case in chosen]
    except (LaunchFailed, MeasurementFailed) as failure:
        console.print(str(failure), markup=False, soft_wrap=True)
        return 2
    missed = 0
    if overhead:
        rows, missed = _overhead_rows(overhead), missed + _missed_by(overhead)
        _show(("overhead of packing", "target", "measured", "95 %"), rows, options.markdown)
        print(
            f"{overhead.steps} batches, {overhead.step_s:.2f} s a step; losses differ by {overhead.loss_difference:.0e} at most\n"
        )
    if gains:
        columns = [_gain_column(gain) for gain in gains]
        missed += sum(abs(gain.off) > PREDICTION for gain in gains)
        _show(("", *(case.name for case in chosen)), list(zip(ROWS, *columns, strict=True)), options.markdown)
    console.print(f"{missed} targets missed" if missed else "all targets reached")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n    python")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps: whether it runs, not a figure to quote")
    parser.add_argument("--pairs", type=int, help="steps of each side that count (default: 20 to 200)")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has TEXT in its name")
    parser.add_argument("--markdown", action="store_true", help="tables for the README on standard output")
    parser.add_argument(
        "--script", help="a checkout's pretrain_gpt.py (default: our own of the installed megatron-core)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "packed-bench-out", help="folder for corpora and logs")
    return parser


def _sized(case: Case, options: argparse.Namespace) -> Case:
    return case.with_pairs(options.pairs or (max(4, case.pairs // 10) if options.quick else case.pairs))


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
    share, step, whole = overhead.loader_share, overhead.step, overhead.whole
    return [
        ("the loader's next(), share of the step", f"below {LOADER_SHARE:.0%}", f"{share.value:.2%}",
         f"{share.low:.2%} to {share.high:.2%}"),
        ("our step over Megatron's", f"below {STEP:.2f}", f"{step.value:.4f}", _interval(step, 4)),
        ("our loader and step over its step alone", "", f"{whole.value:.4f}", _interval(whole, 4)),
    ]  # fmt: skip


def _missed_by(overhead: Overhead) -> int:
    reached = (overhead.loader_share.value < LOADER_SHARE, overhead.step.value < STEP, overhead.loss_difference <= LOSS)
    return reached.count(False)


def _gain_column(gain: Gain) -> tuple[str, ...]:
    """Cells beside ``ROWS``."""
    case, stock, packed = gain.case, gain.stock, gain.packed
    return (
        f"{case.layers} layers of {case.hidden}, {case.vocabulary} tokens",
        f"{case.data * case.microbatches} bins of {case.sequence}",
        f"{stock.waiting:.3f}, {packed.waiting:.3f}",
        f"{gain.fill:.1%}",
        f"{gain.work:.3f}",
        f"{stock.loader_share:.2%}, {packed.loader_share:.2%}",
        f"{_seconds(stock.step_s)}, {_seconds(packed.step_s)}",
        f"{gain.predicted:.3f}",
        f"{gain.measured.value:.3f}",
        f"{_interval(gain.measured, 3)} ({case.pairs})",
        f"{gain.off:+.1%}",
        f"{gain.predicted_in_all:.3f}, {gain.measured_in_all:.3f}",
    )


def _seconds(values) -> str:
    return f"{Median.of(values).value:.2f}"


def _interval(figure: Median, digits: int) -> str:
    return f"{figure.low:.{digits}f} to {figure.high:.{digits}f}"


def _show(headings: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    if markdown:
        for row in (headings, ["---"] * len(headings), *rows):
            print(f"| {' | '.join(row)} |")
        print()
        return
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right" if heading != headings[0] else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
