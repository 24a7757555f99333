"""`python -m matrix.checkout CHECKOUT FOLDER`: run all trials with the pretrain_gpt.py of one checkout.

Each rank is `megatron_balance.run` as torchrun starts it, but forked off a process that has imported Megatron already, which is
most of what a small run takes. Results go to FOLDER/result.json.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from forks import first_failure, settle, start_ranks

from matrix.results import Outcome, Result
from matrix.trials import MODEL, TRIALS, Trial
from megatron_balance.files import write_atomically
from megatron_balance.processes import die_with_parent

_LIMIT_S = 60.0  # of one trial
_OURS = "megatron-balance: error: "


def main(checkout: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # trials name their checkpoints relative to it
    sys.path.insert(0, str(checkout))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    file = Path("result.json")
    before = Result.read(file) if file.is_file() else None  # of a run that was stopped
    outcomes, spent_s = (dict(before.outcomes), before.seconds) if before else ({}, 0.0)
    started_s = time.monotonic()

    def keep() -> None:
        seconds = spent_s + time.monotonic() - started_s
        result = Result(checkout.name, _version(checkout), platform.python_version(), seconds, outcomes)
        write_atomically(file, json.dumps(asdict(result)))

    try:
        _import_megatron()
        if not before:
            _write_documents(Path("text"))
    except Exception as error:  # whatever keeps a checkout from being imported is its result
        outcomes |= {trial.name: Outcome(error=f"{type(error).__name__}: {error}") for trial in TRIALS}
        keep()
        return
    for trial in TRIALS:
        if trial.name not in outcomes:
            outcome = _run(trial, checkout / "pretrain_gpt.py")
            outcomes[trial.name] = replace(outcome, error=outcome.error.replace(f"{checkout}/", ""))
            print(f"  {trial.name}: {outcomes[trial.name].error or 'trained'}", file=sys.stderr, flush=True)
            keep()


def _import_megatron() -> None:
    from megatron_balance import cpu

    cpu.install()
    import megatron.training.arguments  # noqa: F401  what the launcher imports first, too

    import megatron_balance.packing.placement
    import megatron_balance.planning.planner  # noqa: F401

    settle()


def _write_documents(prefix: Path, documents: int = 2000) -> None:
    """Documents of log-normal lengths: runs of one letter, then of the next, so that there is something to learn."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in np.clip(rng.lognormal(np.log(12), 0.9, documents).astype(int), 2, 90).tolist():
        tokens = (rng.integers(100) + np.arange(length) // 3) % 120
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")


def _version(checkout: Path) -> str:
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


# --- one trial --------------------------------------------------------------------------------------------------------


def _run(trial: Trial, script: Path) -> Outcome:
    folder = Path("runs") / trial.name
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    folder.mkdir(parents=True)
    ranks = start_ranks(trial.processes, lambda rank: _log(folder, rank), lambda: _train(trial, script, folder))
    if failed := first_failure(ranks, _LIMIT_S):
        return Outcome(error=_reason(folder, *failed))
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    losses = [step["loss"] for step in seen[-1]["steps"]] if seen else []
    if not losses:
        return Outcome(error="no step was trained")
    return Outcome(losses, [[len(chunk["layers"]) for chunk in rank["chunks"]] for rank in seen])


def _train(trial: Trial, script: Path, folder: Path) -> None:
    from megatron_balance import run
    from megatron_balance.megatron.observer import Observer
    from megatron_balance.megatron.registry import registry

    observer = Observer(folder)

    def observe() -> None:
        for hook in observer.hooks():
            registry.apply(hook)

    arguments = ["--device", "cpu", str(script), *MODEL.split(), "--data-path", "text", *trial.flags.split()]
    try:
        run.main(arguments, ready=observe)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    observer.write()


def _log(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}.log"


def _reason(folder: Path, rank: int, status: int | None) -> str:
    """Why a rank failed."""
    if status is None:
        return f"no end within {_LIMIT_S:.0f} s"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return _error_in(_log(folder, rank).read_text(errors="replace"))


def _error_in(output: str) -> str:
    """The line that says what went wrong."""
    lines = [line.strip() for line in output.splitlines()]
    ours = [line for line in lines if line.startswith(_OURS)]
    raised = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    return (ours or raised or lines or ["no output"])[-1]


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
