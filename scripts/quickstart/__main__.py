"""`python -m quickstart`: what `scripts/quickstart.sh` runs once Python and the packages are there."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from megatron_balance.diagnosis.result import SEQUENCE_LENGTHS, STAGE_SPLIT
from megatron_balance.files import write_atomically
from megatron_balance.pipeline.plan import Plan, load_plan
from quickstart import proof, session
from quickstart.corpus import Corpus, build_corpus, read_documents, standard_library
from quickstart.launch import Job, Size
from quickstart.observations import read_run
from quickstart.packed import comparison, jobs
from quickstart.picture import draw
from quickstart.proof import Proof
from quickstart.report import (
    BALANCED,
    NOISY,
    TOLERANCE,
    UNIFORM,
    Round,
    Summary,
    counted,
    layers_text,
    summarize,
    table,
    typical_step,
)
from quickstart.session import console, stage
from quickstart.sizes import CORPUS_BYTES, packed_case, packed_tokens, split_size
from quickstart.turns import order_of_turns

_QUICK_PAIRS, _QUICK_PACKED_PAIRS = 3, 5


def main() -> int:
    options = _options()
    return session.run(options.out, lambda out: _compare(out, options.quick))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart.sh")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=session.REPOSITORY / "quickstart-out")
    return parser.parse_args()


def _compare(out: Path, quick: bool) -> int:
    began = time.monotonic()
    device = session.device()
    size = replace(split_size(device), **({"pairs": _QUICK_PAIRS} if quick else {}))
    _clear(out)
    with session.beside("quickstart.warm"):
        corpus = _corpus(size, out)
        job = Job(size, device, corpus.prefix, out)
        with stage("starting checkpoint, from one unsplit run") as progress:
            job.start("start", progress)
    rounds = _rounds(job)
    summary = summarize(rounds, size.warmup, load_plan(job.plan), device)
    measured = counted(rounds, size.warmup)
    uniform, balanced = ([one for one in measured if one.split == split] for split in (UNIFORM, BALANCED))
    draw(summary, typical_step(uniform), typical_step(balanced), out / "timelines.png")
    console.print("", table(summary), "")
    launcher = _packed_round(out, device, quick)
    proofs = [
        Proof.of(STAGE_SPLIT, job.trace(UNIFORM), job.trace(BALANCED)),
        Proof.of(SEQUENCE_LENGTHS, launcher.trace(jobs.STOCK), launcher.trace(jobs.PACKED)),
    ]
    packed = comparison.Summary.of(proofs[1], launcher.case.pairs)
    console.print("", comparison.table(packed), "", proof.table(proofs), "")
    results = {**summary.to_json(), "packing": asdict(packed), "diagnosis": [one.to_json() for one in proofs]}
    write_atomically(out / "summary.json", json.dumps(results, indent=2) + "\n")
    for name in ("timelines.png", "summary.json", "plan.json", "logs"):
        session.say(str(out / name))
    for trace in (job.trace(UNIFORM), launcher.trace(jobs.STOCK)):
        session.say(f"the whole diagnosis: megatron-balance diagnose {trace}")
    console.print(f"all in {time.monotonic() - began:.0f} s")
    return _verdict(summary)


def _clear(out: Path) -> None:
    """Remove what an earlier, perhaps interrupted, run left, except corpora."""
    for name in ("start", "observations", "traces", "data-cache", "costs", "logs", "packed"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("plan.json", "summary.json", "timelines.png"):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir()


def _corpus(size: Size, out: Path) -> Corpus:
    with stage("corpus of Python's standard library") as progress:
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
    order = order_of_turns(BALANCED, UNIFORM, job.size.steps)
    with stage("uniform and balanced in turns, a step each") as progress:
        job.compare(order, progress, lambda: _say_prediction(load_plan(job.plan)))
    runs = {split: read_run(job.observations(split)) for split in (UNIFORM, BALANCED)}
    steps = {split: iter(run[1]) for split, run in runs.items()}
    return [Round(split, runs[split][0], next(steps[split])) for split in order]


def _packed_round(out: Path, device: str, quick: bool) -> jobs.Launcher:
    """Documents of very different lengths, chopped as stock Megatron does and packed, in turns."""
    case = packed_case(device)
    if quick:
        case = case.with_pairs(_QUICK_PACKED_PAIRS)
    launcher = jobs.Launcher(case, out / "packed", device=device, records=True)
    launcher.out.mkdir()
    with stage("chopped and packed documents in turns, a step each") as progress:
        data = jobs.blend(case, packed_tokens(case), out, progress)
        launcher.compare(data, order_of_turns(jobs.STOCK, jobs.PACKED, case.steps), progress)
    return launcher


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
    sys.exit(main())
