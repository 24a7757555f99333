"""Start real training runs for tests: processes of their own, losses from the returned tensors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

DRIVER = Path(__file__).with_name("observed_run.py")

# A GPT of a few thousand parameters; fp32, no dropout, so that splits can be compared to the last digits.
TINY = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
    " --global-batch-size 8 --train-iters 20 --lr 1e-3 --lr-decay-style constant --mock-data --split 98,1,1"
    " --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8 --num-workers 0 --log-interval 1"
    " --eval-iters 0 --eval-interval 1000 --transformer-impl local --hidden-dropout 0 --attention-dropout 0"
).split()


@dataclass(frozen=True)
class Run:
    """A finished launch.

    Attributes:
        status: exit status of torchrun (or of the single process).
        output: standard output and error of all processes, mixed.
        ranks: what the observer wrote, by rank; empty where no step ran.
        folder: of the launch; observations are in its ``seen``.
    """

    status: int
    output: str
    ranks: dict[int, dict]
    folder: Path

    @property
    def losses(self) -> list[float]:
        """Loss of each step, from the tensor that `train_step` returned on the last pipeline stage."""
        for rank in self.ranks.values():
            losses = [step["loss"] for step in rank["steps"]]
            if None not in losses:
                return losses
        raise AssertionError(f"no rank saw a loss:\n{self.output[-3000:]}")

    @property
    def gradient_norms(self) -> list[float]:
        """Norm of the whole model's gradient in each step, before clipping, that `train_step` returned alike on all ranks."""
        norms, *others = ([step["gradient_norm"] for step in rank["steps"]] for rank in self.ranks.values())
        assert all(other == norms for other in others), [norms, *others]
        return norms


FORKS, TORCHRUN, ALONE = "forks", "torchrun", "alone"


def launch(
    folder: Path,
    arguments: list[str],
    processes: int = 1,
    script: str | None = None,
    by: str = FORKS,
    environment: dict[str, str] | None = None,
    timeout_s: float = 300,
    kill_when: str | None = None,
    driver: Path = DRIVER,
) -> Run:
    """Run `megatron_balance.run` with ``arguments`` and observe it.

    Args:
        folder: for the observations; made when absent.
        processes: one rank each, on this machine.
        script: a checkout's pretrain_gpt.py; None for our own.
        by: ``torchrun``; ``forks`` of a process that has imported Megatron already; or ``alone``, a single one without a launcher's
            variables, as a dry run is. Where forks will not do, as with another script, these are processes of their own.
        environment: variables beyond this process's.
        kill_when: once the output holds this, all processes are killed as by kill -9.
        driver: what is started on each rank.
    """
    seen = folder / "seen"
    given = [str(seen), "--device", "cpu", *([script] if script else []), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.log"
    log.write_bytes(b"")
    if by != TORCHRUN and script is None and environment is None and kill_when is None:
        status = _starter().run(driver, given, processes, by == ALONE, folder, log, variables, timeout_s)
    else:
        status = _started(by, [str(driver), *given], processes, folder, log, variables, timeout_s, kill_when)
    output = log.read_text(errors="replace")
    ranks = {
        seen_by["rank"]: seen_by
        for path in sorted(seen.glob("rank-*.json"))
        for seen_by in [json.loads(path.read_text())]
    }
    return Run(status, output, ranks, folder)


def dry_run(folder: Path, arguments: list[str], world_size: int = 2, **options) -> Run:
    """Plan for ``world_size`` processes in a single one; ``options`` are `launch`'s."""
    return launch(folder, [*arguments, f"--balanced-pipeline-dry-run={world_size}"], by=ALONE, **options)


def _started(
    by: str,
    words: list[str],
    processes: int,
    folder: Path,
    log: Path,
    variables: dict[str, str],
    timeout_s: float,
    kill_when: str | None,
) -> int:
    """Exit status of processes of their own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *([] if by == ALONE else torchrun), *words]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=folder, start_new_session=True
        )
    try:
        _wait(process, log, timeout_s, kill_when)
    finally:
        _kill(process)
    return process.returncode


class _Starter:
    """The process of `forked.py`, and its launches."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked.py")), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            text=True,
        )

    def run(
        self,
        driver: Path,
        arguments: list[str],
        processes: int,
        alone: bool,
        folder: Path,
        log: Path,
        variables: dict[str, str],
        timeout_s: float,
    ) -> int:
        """Exit status of a launch; all its processes are ended when this returns."""
        paths = {"driver": str(driver), "folder": str(folder), "log": str(log)}
        job = {**paths, "arguments": arguments, "processes": processes, "alone": alone, "variables": variables}
        self._process.stdin.write(f"{json.dumps(job)}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        assert said, "forked.py has ended before it could start a launch: see its standard error"
        leader = int(said)
        late = threading.Timer(timeout_s, os.killpg, (leader, signal.SIGKILL))
        late.start()
        try:
            return int(self._process.stdout.readline())
        finally:
            late.cancel()


@functools.cache
def _starter() -> _Starter:
    return _Starter()


def _wait(process: subprocess.Popen, log: Path, timeout_s: float, kill_when: str | None) -> None:
    if kill_when is None:
        process.wait(timeout_s)
        return
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and kill_when not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


def _kill(process: subprocess.Popen) -> None:
    """End the launch and whatever it left; workers of torchrun are in sessions of their own.

    The launch itself goes first, before it can see that a worker has gone, and end in a way of its own.
    """
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end with the others
                child.kill()
        process.wait()


def trained(run: Run) -> Run:
    """``run``, when it ended well; its last lines in the failure otherwise."""
    assert run.status == 0, run.output[-6000:]
    return run
