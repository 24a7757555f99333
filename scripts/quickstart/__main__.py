"""`python -m quickstart`: what `scripts/quickstart.sh` runs once Python and the packages are there."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from megatron_balance.files import write_atomically
from megatron_balance.megatron.measuring.launch import MeasurementFailed
from megatron_balance.pipeline.plan import Plan, load_plan
from quickstart.corpus import Corpus, build_corpus, read_documents, standard_library
from quickstart.launch import ENVIRONMENT, Job, LaunchFailed, Size
from quickstart.observations import read_run
from quickstart.packed import comparison, jobs
from quickstart.picture import draw
from quickstart.report import (
    BALANCED,
    NOISY,
    TOLERANCE,
    UNIFORM,
    Round,
    Summary,
    counted,
    layers_text,
    order_of_rounds,
    summarize,
    table,
    typical_step,
)

REPOSITORY = Path(__file__).resolve().parents[2]
CORPUS_BYTES = 12_000_000  # enough for a tokenizer to learn 64k entries

# Layers, head and embedding such that the split pays on any CPU: the head is as much as 10 to 20 of these layers, more
# on a machine that is quick to start small operations, and all layers in one stage are a good answer in that range.
CPU = Size(
    layers=16,
    hidden=256,
    heads=4,
    vocabulary=65536,
    sequence=128,
    micro_batch=2,
    microbatches=8,
    warmup=1,
    pairs=16,
)
# GPUs need wider layers and more tokens before arithmetic, not launching kernels, takes the time.
GPU = replace(CPU, hidden=1024, heads=16, sequence=1024, micro_batch=4, microbatches=16, warmup=5, pairs=50)

# Source files of 20,000 tokens and more, and functions: what packing gains depends on the lengths, so these are real ones.
PACKED_CPU = jobs.Case("packed", jobs.MIXED, 8192, pipeline=2, data=1, microbatches=8, pairs=12)
PACKED_GPU = replace(PACKED_CPU, layers=11, hidden=1024, heads=16, pairs=30)
PACKED_TOKENS = 800_000

console = Console()


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    out = options.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(
            f"{out} cannot be used for results ({error.strerror}): give another folder with --out", markup=False
        )
        return 2
    try:
        with _alone_in(out):
            return _compare(out, options.quick)
    except (LaunchFailed, MeasurementFailed) as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart.sh")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "quickstart-out")
    return parser.parse_args()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Hold ``out`` for this process; the kernel lets go of it however the process ends."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"another quickstart is using {out}: wait for it, or give another folder with --out"
            ) from None
        yield


def _compare(out: Path, quick: bool) -> int:
    began = time.monotonic()
    device = _device()
    size = GPU if device == "cuda" else CPU
    if quick:
        size = replace(size, pairs=size.pairs // 4)
    _clear(out)
    corpus = _corpus(size, out)
    job = Job(size, device, corpus.prefix, out)
    with _stage("starting checkpoint, from one unsplit run") as progress:
        job.start("start", progress)
    rounds = _rounds(job)
    summary = summarize(rounds, size.warmup, load_plan(job.plan), device)
    measured = counted(rounds, size.warmup)
    uniform, balanced = ([one for one in measured if one.split == split] for split in (UNIFORM, BALANCED))
    draw(summary, typical_step(uniform), typical_step(balanced), out / "timelines.png")
    console.print("", table(summary), "")
    packed = _packed_round(out, device, quick)
    console.print("", comparison.table(packed), "")
    results = {**summary.to_json(), "packing": asdict(packed)}
    write_atomically(out / "summary.json", json.dumps(results, indent=2) + "\n")
    for name in ("timelines.png", "summary.json", "plan.json", "logs"):
        console.print(f"{out / name}", highlight=False, soft_wrap=True)
    console.print(f"all in {time.monotonic() - began:.0f} s")
    return _verdict(summary)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def _clear(out: Path) -> None:
    """Remove what an earlier, perhaps interrupted, run left, except corpora."""
    for name in ("start", "observations", "data-cache", "costs", "logs", "packed"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("plan.json", "summary.json", "timelines.png"):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir()


@contextlib.contextmanager
def _stage(name: str) -> Iterator:
    """Show that ``name`` is under way, and how far; a line with its time when it is done."""
    began = time.monotonic()
    with console.status(name, refresh_per_second=2) as status:  # drawing takes time from the training
        yield lambda text: status.update(f"{name}: {text}")
    console.print(f"[green]done[/green] {name} [dim]({time.monotonic() - began:.0f} s)[/dim]", highlight=False)


def _corpus(size: Size, out: Path) -> Corpus:
    with _stage("corpus of Python's standard library") as progress:
        progress("reading")
        documents = read_documents(standard_library(), CORPUS_BYTES)
        corpus, built = build_corpus(documents, size.vocabulary, out, progress)
    console.print(
        f"     {corpus.documents} files, {corpus.tokens / 1e6:.1f} million tokens, vocabulary of {corpus.learned + 1}"
        f"{'' if built else ' (kept from an earlier run)'}",
        highlight=False,
    )
    return corpus


def _rounds(job: Job) -> list[Round]:
    order = order_of_rounds(job.size.steps)
    with _stage("uniform and balanced in turns, a step each") as progress:
        job.compare(order, progress, lambda: _say_prediction(load_plan(job.plan)))
    runs = {split: read_run(job.observations(split)) for split in (UNIFORM, BALANCED)}
    steps = {split: iter(run[1]) for split, run in runs.items()}
    return [Round(split, runs[split][0], next(steps[split])) for split in order]


def _packed_round(out: Path, device: str, quick: bool) -> comparison.Summary:
    """Documents of very different lengths, chopped as stock Megatron does and packed, in turns."""
    case = PACKED_GPU if device == "cuda" else PACKED_CPU
    if quick:
        case = replace(case, pairs=case.pairs // 4, microbatches=case.microbatches // 2)
    folder = out / "packed"
    folder.mkdir()
    with _stage("chopped and packed documents in turns, a step each") as progress:
        data = jobs.corpus(case, PACKED_TOKENS, out, progress)
        gain = comparison.compare(jobs.Launcher(case, folder, device=device), data.prefix, progress)
    return comparison.Summary.of(gain)


def _say_prediction(plan: Plan) -> None:
    console.print(
        f"     predicted on {plan.costs_source}: uniform {plan.uniform_step_s:.2f} s a step, {layers_text(plan.layers)} layers"
        f" {plan.step_s:.2f} s, {plan.uniform_step_s / plan.step_s:.3f} times faster",
        highlight=False,
    )


def _verdict(summary: Summary) -> int:
    if summary.turn_spread > NOISY:
        console.print(
            f"[yellow]Steps of the same split differ by a factor of {summary.turn_spread:.2f}: something else used"
            " this machine, and the measured speed-up is as uncertain. Run it again when it is quiet.[/yellow]"
        )
    if summary.losses_agree:
        return 0
    console.print(
        f"[bold red]THE LOSSES DIFFER: by {summary.max_loss_difference:.1e} relative, where rounding explains at most"
        f" {TOLERANCE:.0e}. The two splits did not compute the same.[/bold red]"
    )
    return 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.update(ENVIRONMENT)
    sys.exit(main())
