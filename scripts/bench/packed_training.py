#!/usr/bin/env python3
"""What `--varlen-packing` costs and gains in real training: Megatron on the CPU, one core a rank, real text.

1. Overhead: one job trains each of its batches twice, with our forward step and with Megatron's own on the same tokens and
   bounds (inter-document masking), under the same attention. The loader's share is measured without loading processes, where
   reading and planning are within the step, and with Megatron's default of two, beside a loader that has nothing to do.
2. Gain: stock inter-document masking and packing train on the same corpus in turns, a step each; labels learned a second, and
   beside it what the simulator says of the same batches on costs measured on this machine.
3. Shapes: the same for packing with fixed shapes ("stock" in the table) and with variable ones.

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
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "scripts")
for path in map(str, PATHS):  # run from a checkout that is not installed
    if path not in sys.path:
        sys.path.insert(0, path)

from quickstart.launch import LaunchFailed  # noqa: E402
from quickstart.packed.comparison import ROWS, column, compare  # noqa: E402
from quickstart.packed.figures import Gain, Overhead  # noqa: E402
from quickstart.packed.jobs import DEFINITIONS, FILES, MIXED, PADDED, STOCK, Case, Launcher, corpus, environment  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_balance.megatron.measuring.launch import MeasurementFailed  # noqa: E402

OVERHEAD = Case("one rank", DEFINITIONS, 2048, pipeline=1, data=1, microbatches=2, pairs=200, workers=2)
OVERHEADS = (OVERHEAD, replace(OVERHEAD, name="one rank, no loading processes", workers=0))
GAINS = (
    Case("mixed, PP2", MIXED, 8192, pipeline=2, data=1, microbatches=8, pairs=30),
    Case("mixed, DP2", MIXED, 8192, pipeline=1, data=2, microbatches=4, pairs=30),
    Case("functions, PP2", DEFINITIONS, 4096, pipeline=2, data=1, microbatches=16, pairs=20),
    Case("functions, DP2", DEFINITIONS, 4096, pipeline=1, data=2, microbatches=4, pairs=40),
    Case("files, PP2", FILES, 1024, pipeline=2, data=1, microbatches=8, pairs=40),
    Case("files, DP2", FILES, 1024, pipeline=1, data=2, microbatches=4, pairs=40),
)
SHAPES = (Case("shapes, PP2", MIXED, 8192, pipeline=2, data=1, microbatches=8, pairs=30),)
# Targets.
LOADER_SHARE = 0.01
STEP = 1.01
PREDICTION = 0.10
LOSS = 2e-6
CORPUS_TOKENS = 1_600_000


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ.update(environment(PATHS))
    console = Console(stderr=options.markdown, highlight=False)
    chosen = [case for case in (*GAINS, *SHAPES) if options.only.lower() in case.name.lower()]
    twice = [case for case in OVERHEADS if options.only.lower() in case.name]
    try:
        overheads = {case: _overhead(_sized(case, options), options, console) for case in twice}
        gains = [_gain(_sized(case, options), options, console) for case in chosen]
    except (LaunchFailed, MeasurementFailed) as failure:
        console.print(str(failure), markup=False, soft_wrap=True)
        return 2
    missed = 0
    for case, overhead in overheads.items():
        missed += _missed_by(overhead, case)
        _show(
            (f"overhead of packing: {case.name}", "target", "measured", "95 %"), _rows(overhead, case), options.markdown
        )
        print(
            f"{overhead.steps} batches, {overhead.step_s:.2f} s a step; losses differ by {overhead.loss_difference:.0e} at most\n"
        )
    if gains:
        columns = [column(gain) for gain in gains]
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

        def progress(text: str) -> None:
            status.update(f"{case.name}: {text}")

        data = corpus(case, CORPUS_TOKENS, options.out.resolve(), progress)
        return compare(launcher, data.prefix, progress, PADDED if case.name in {one.name for one in SHAPES} else STOCK)


def _rows(overhead: Overhead, case: Case) -> list[tuple[str, ...]]:
    shares = (
        ("the loader's next(), share of the step", overhead.loader_share, "" if case.workers else f"below {LOADER_SHARE:.0%}"),
        ("a loader's that has nothing to do", overhead.idle_share, ""),
        ("the difference: what packing takes", overhead.own_share, f"below {LOADER_SHARE:.0%}" if case.workers else ""),
    )  # fmt: skip
    ratios = (
        ("our step over Megatron's", overhead.step, f"below {STEP:.2f}"),
        ("our loader and step over its step alone", overhead.whole, ""),
    )
    return [
        *((name, target, f"{each.value:.2%}", f"{each.low:.2%} to {each.high:.2%}") for name, each, target in shares),
        *((name, target, f"{each.value:.4f}", each.interval(4)) for name, each, target in ratios),
    ]


def _missed_by(overhead: Overhead, case: Case) -> int:
    """With loading processes, what torch takes to hand tensors over is none of packing's doing."""
    share = overhead.own_share if case.workers else overhead.loader_share
    reached = (share.value < LOADER_SHARE, overhead.step.value < STEP, overhead.loss_difference <= LOSS)
    return reached.count(False)


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
