"""Megatron's command line for each run, and running it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quickstart.report import BALANCED, UNIFORM
from quickstart.turns import Turns

_STEP = re.compile(rb" iteration +(\d+)/ *(\d+) \|")
_POLL_S = 1.0
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
_STOP_S = 15.0  # torchrun needs a moment to end its workers
_LINES_OF_FAILURE = 30


@dataclass(frozen=True)
class Size:
    """Model, batch and length of a run.

    Attributes:
        layers, hidden, heads, vocabulary, sequence: of the model.
        micro_batch: sequences in a micro-batch.
        microbatches: micro-batches of one step.
        warmup: steps of each split that do not count in times.
        pairs: steps of each split that do. One more does not: while it trains, the other split's processes are ending.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    microbatches: int
    warmup: int
    pairs: int

    @property
    def steps(self) -> int:
        return self.warmup + self.pairs + 1


class LaunchFailed(Exception):
    """A launch ended with an error; the message holds the end of its log and where the rest is."""


@dataclass(frozen=True)
class Job:
    """What all launches of one comparison share.

    Attributes:
        size: of the model and the runs.
        device: "cpu" or "cuda".
        data: prefix of the indexed dataset.
        out: the folder for results.
        from_scratch: whether each split begins with random weights, other ones on each of its stages, and not with those that
            `start` saved.
    """

    size: Size
    device: str
    data: Path
    out: Path
    from_scratch: bool = False

    @property
    def checkpoint(self) -> Path:
        return self.out / "start"

    @property
    def plan(self) -> Path:
        return self.out / "plan.json"

    @property
    def costs_cache(self) -> Path:
        return self.out / "costs"

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    @property
    def turns(self) -> Path:
        """Folder in which the processes that take turns leave word."""
        return self.out / "observations"

    def observations(self, name: str) -> Path:
        """Folder for what the ranks of launch ``name`` saw."""
        return self.turns / name

    def trace(self, split: str) -> Path:
        """Folder for the trace of the steps that count."""
        return self.out / "traces" / split

    def start(self, name: str, progress: Callable[[str], None]) -> None:
        """Train one unsplit step and save the weights: the point from which all rounds start.

        From scratch, Megatron's initial weights depend on the split, for each stage seeds its own generator.
        """
        size = self.size
        batch = ["--global-batch-size", size.micro_batch, "--train-iters", 1]
        saving = ["--save", self.checkpoint, "--save-interval", 1, "--no-save-optim", "--no-save-rng"]
        run({self._log(name): self._command(name, 1, [*self._flags(), *batch, *saving])}, progress)

    def compare(
        self, order: list[str], progress: Callable[[str], None], planned: Callable[[], None] = lambda: None
    ) -> None:
        """Train on two pipeline stages, uniform and balanced in turns, or one of them alone.

        The balanced job follows when the uniform one waits for its turn: it measures what layers and head cost with the
        processors for itself, but beside a waiting job, as both then train. (A job waiting beside it slows a step by some per
        cent, the head most; it shares caches and memory.)

        Args:
            order: the split that trains a step, for each turn.
            progress: told how far it is.
            planned: called when there is a plan, before a step is trained.
        """
        size = self.size
        batch = ["--global-batch-size", size.micro_batch * size.microbatches, "--train-iters", size.steps]
        loading = ["--load", self.checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"]
        start = [] if self.from_scratch else loading
        flags = [*self._flags(), *batch, *start, "--pipeline-model-parallel-size", 2]
        commands = {
            self._log(split): self._command(split, 2, [*flags, *self._traced(split), *ours], order)
            for split, ours in {UNIFORM: [], BALANCED: self._balancing()}.items()
            if split in order
        }
        environment = {**ENVIRONMENT, "MEGATRON_BALANCE_CACHE": str(self.costs_cache)}

        uniform = Turns(self.turns, order, UNIFORM, rank=0, processes=2)
        unsaid = [planned] if BALANCED in order else []

        def report(text: str) -> None:
            if unsaid and self.plan.exists():
                unsaid.pop()()
            progress("starting, measuring costs and planning" if unsaid else text)

        run(commands, report, environment, uniform.are_awaited)

    def _balancing(self) -> list:
        return ["--balanced-pipeline", "--balanced-pipeline-plan", self.plan]

    def _traced(self, split: str) -> list:
        return traced(self.trace(split), self.size.warmup, self.size.steps)

    def _flags(self) -> list:
        size = self.size
        return [
            *("--num-layers", size.layers, "--hidden-size", size.hidden, "--num-attention-heads", size.heads),
            *("--seq-length", size.sequence, "--max-position-embeddings", size.sequence),
            *("--untie-embeddings-and-output-weights", "--attention-dropout", 0, "--hidden-dropout", 0),
            *("--micro-batch-size", size.micro_batch, "--lr", 3e-4, "--lr-decay-style", "constant"),
            # Megatron's own layers: Transformer Engine and Apex need a GPU and a compiler.
            *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
            # The data are token ids, so training needs no tokenizer, only its size. NullTokenizer gives just that;
            # for a real one Megatron would need the package transformers.
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", size.vocabulary),
            *("--data-path", self.data, "--data-cache-path", self.out / "data-cache", "--split", "100,0,0"),
            *("--num-workers", 0, "--ckpt-format", "torch_dist"),
            *("--log-interval", 1, "--eval-iters", 0, "--eval-interval", 1000),
        ]

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _command(self, name: str, processes: int, flags: list, order: list[str] | None = None) -> list[str]:
        turns = [name, ",".join(order)] if order else []
        target = ["-m", "quickstart.observed", self.observations(name), *turns, "--", "--device", self.device]
        return [str(word) for word in (*torchrun(processes), *target, *flags)]


def torchrun(processes: int) -> list:
    """The command in front of what each of the processes on this machine runs."""
    # A free port and this machine's own address: other jobs, or a host name that does not resolve, do no harm.
    rendezvous = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", processes]
    # Looking after the ranks takes time from them: every 0.1 s by default.
    return [sys.executable, "-m", "quickstart.torchrun", *rendezvous, "--monitor-interval", 2]


def traced(folder: Path, warmup: int, steps: int) -> list:
    """Flags that record the steps between the first ``warmup`` of ``steps`` and the last one, and keep the garbage collector,
    whose pauses of up to a fifth of a second happen to hit one rank and one job, out of them.
    """
    return ["--straggler-trace", folder, "--straggler-trace-steps", f"{warmup + 1}:{steps}", "--manual-gc"]


def run(
    commands: dict[Path, list[str]],
    progress: Callable[[str], None],
    environment: dict[str, str] = ENVIRONMENT,
    follows: Callable[[], bool] = lambda: True,
) -> None:
    """Run ``commands`` side by side to their end, each with all output in its log.

    Whatever ends this function early ends the commands too.

    Args:
        commands: by log file.
        progress: hears of the training.
        environment: variables to add.
        follows: whether the commands behind the first one can be started; asked until they can.

    Raises:
        LaunchFailed: the exit status of a command is not 0.
    """
    processes: dict[Path, subprocess.Popen] = {}
    waiting = list(commands.items())
    try:
        while True:
            while waiting and (not processes or follows()):
                log, command = waiting.pop(0)
                processes[log] = _start(command, log, environment)
            statuses = [process.poll() for process in processes.values()]
            if any(statuses) or None not in statuses:
                break
            time.sleep(_POLL_S)
            progress(min(map(steps_reached, processes), key=lambda reached: reached[0])[1])
    finally:
        for process in processes.values():
            stop(process)
    if waiting and not any(statuses):
        raise LaunchFailed(
            f"This launch ended before the others could follow. Its whole output: {next(iter(processes))}"
        )
    for log, status in zip(processes, statuses, strict=True):  # as it was before the others were stopped
        if status:
            end = end_of_log(log.read_text(errors="replace"))
            raise LaunchFailed(f"{end}\n\nThis launch failed with status {status}. Its whole output: {log}")


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen:
    with log.open("w") as file:
        file.write(f"$ {' '.join(f'{k}={v}' for k, v in environment.items())} {shlex.join(command)}\n\n")
        file.flush()
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it in order
        )


def stop(process: subprocess.Popen) -> None:
    """End ``process`` and the processes it started; nothing where it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def steps_reached(log: Path) -> tuple[int, str]:
    """How far the training in ``log`` is: the number of its last step, and "step 3 of 8", or 0 and "starting"."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        steps = _STEP.findall(file.read())
    if not steps:
        return 0, "starting"
    done, total = (int(number) for number in steps[-1])
    return done, f"step {done} of {total}"


def end_of_log(text: str) -> str:
    """The last lines before torchrun's own account of the failure, which does not know its cause."""
    lines = text.rstrip().splitlines()
    end = next((i for i, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return "\n".join(lines[max(0, end - _LINES_OF_FAILURE) : end])
