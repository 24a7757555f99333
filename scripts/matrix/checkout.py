"""`python -m matrix.checkout CHECKOUT FOLDER`: run all trials with the pretrain_gpt.py of one checkout.

Each rank is `megatron_balance.run` as torchrun starts it, but forked off a process that has imported Megatron already, which is
most of what a small run takes. Results go to FOLDER/result.json.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import platform
import re
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from matrix.results import Outcome, Result
from matrix.trials import MODEL, TRIALS, Trial
from megatron_balance.files import write_atomically
from megatron_balance.processes import die_with_parent

_LIMIT_S = 60.0  # of one trial
_GRACE_S = 3.0  # for the other ranks, once one has failed
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

    gc.collect()
    gc.freeze()  # forks share these pages for as long as nobody counts their objects


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
    folder.mkdir(parents=True, exist_ok=True)
    port, ranks = _free_port(), {}
    for rank in range(trial.processes):
        pid = os.fork()
        if pid == 0:
            _become(trial, rank, port, script, folder)
        ranks[pid] = rank
    failed = _wait(ranks)
    if failed is not None:
        rank, reason = failed
        return Outcome(error=reason or _error_in((folder / f"output-{rank}.log").read_text(errors="replace")))
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    losses = [step["loss"] for step in seen[-1]["steps"]] if seen else []
    if not losses:
        return Outcome(error="no step was trained")
    return Outcome(losses, [[len(chunk["layers"]) for chunk in rank["chunks"]] for rank in seen])


def _become(trial: Trial, rank: int, port: int, script: Path, folder: Path) -> NoReturn:
    """Turn this fork into a rank of the trial, and end."""
    die_with_parent()
    output = os.open(folder / f"output-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    size = str(trial.processes)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        status = _train([str(script), *MODEL.split(), "--data-path", "text", *trial.flags.split()], folder)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # end what was started, as the processes that write checkpoints
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the ends of interpreter and parent's frames are not this process's


def _train(arguments: list[str], folder: Path) -> int:
    from megatron_balance import run
    from megatron_balance.megatron.observer import Observer
    from megatron_balance.megatron.registry import registry

    observer = Observer(folder)

    def observe() -> None:
        for hook in observer.hooks():
            registry.apply(hook)

    try:
        run.main(["--device", "cpu", *arguments], ready=observe)
    except SystemExit as end:
        if end.code not in (None, 0):
            return int(end.code) if isinstance(end.code, int) else 1
    observer.write()
    return 0


def _wait(ranks: dict[int, int]) -> tuple[int, str] | None:
    """Wait for the processes; the first rank to fail, with why where its output does not say so."""
    running, failed = dict(ranks), None
    deadline_s = time.monotonic() + _LIMIT_S
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if code and failed is None:
                failed = rank, f"killed by {signal.Signals(-code).name}" if code < 0 else ""
                deadline_s = time.monotonic() + _GRACE_S
        elif time.monotonic() > deadline_s:
            failed = failed or (min(running.values()), f"no end within {_LIMIT_S:.0f} s")
            for late in running:
                os.kill(late, signal.SIGKILL)
                os.waitpid(late, 0)
            running = {}
        else:
            time.sleep(0.05)
    return failed


def _error_in(output: str) -> str:
    """The line that says what went wrong."""
    lines = [line.strip() for line in output.splitlines()]
    ours = [line for line in lines if line.startswith(_OURS)]
    raised = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    return (ours or raised or lines or ["no output"])[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
