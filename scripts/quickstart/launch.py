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

from quickstart.report import BALANCED

_STEP = re.compile(rb" iteration +(\d+)/ *(\d+) \|")
_POLL_S = 0.3
_STOP_S = 15.0  # torchrun needs a moment to end its workers
_LINES_OF_FAILURE = 30


@dataclass(frozen=True)
class Size:
    """Model, batch and length of a run.

    Attributes:
        layers, hidden, heads, vocabulary, sequence: of the model.
        micro_batch: sequences in a micro-batch.
        microbatches: micro-batches of one step.
        steps: steps of each launch.
        warmup: of these, how many do not count in times.
        pairs: launches of each split.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    microbatches: int
    steps: int
    warmup: int
    pairs: int


class LaunchFailed(Exception):
    """A launch ended with an error; the message holds the end of its log and where the rest is."""


@dataclass(frozen=True)
class Job:
    """What all launches of one quickstart share.

    Attributes:
        size: of the model and the runs.
        device: "cpu" or "cuda".
        data: prefix of the indexed dataset.
        out: the folder for results.
    """

    size: Size
    device: str
    data: Path
    out: Path

    @property
    def checkpoint(self) -> Path:
        return self.out / "start"

    @property
    def plan(self) -> Path:
        return self.out / "plan.json"

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def observations(self, name: str) -> Path:
        """Folder for what the ranks of launch ``name`` saw."""
        return self.out / "observations" / name

    def start(self, name: str, progress: Callable[[str], None]) -> None:
        """Train one unsplit step and save the weights: the point from which all rounds start.

        From scratch, Megatron's initial weights depend on the split, for each stage seeds its own generator.
        """
        size = self.size
        batch = ["--global-batch-size", size.micro_batch, "--train-iters", 1]
        saving = ["--save", self.checkpoint, "--save-interval", 1, "--no-save-optim", "--no-save-rng"]
        self._launch(name, 1, [*self._flags(), *batch, *saving], progress)

    def round(self, name: str, split: str, progress: Callable[[str], None]) -> None:
        """Train on two pipeline stages from the starting checkpoint."""
        size = self.size
        batch = ["--global-batch-size", size.micro_batch * size.microbatches, "--train-iters", size.steps]
        loading = ["--load", self.checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"]
        pipeline = ["--pipeline-model-parallel-size", 2]
        if split == BALANCED:
            pipeline += ["--balanced-pipeline", "--balanced-pipeline-plan", self.plan]
        self._launch(name, 2, [*self._flags(), *batch, *loading, *pipeline], progress)

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

    def _launch(self, name: str, processes: int, flags: list, progress: Callable[[str], None]) -> None:
        torchrun = [sys.executable, "-m", "quickstart.torchrun"]
        # A free port and this machine's own address: other jobs, or a host name that does not resolve, do no harm.
        rendezvous = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", processes]
        target = ["-m", "quickstart.observed", self.observations(name), "--", "--device", self.device]
        run([str(word) for word in (*torchrun, *rendezvous, *target, *flags)], self.logs / f"{name}.log", progress)


def run(command: list[str], log: Path, progress: Callable[[str], None]) -> None:
    """Run ``command`` to its end with all output in ``log``; ``progress`` hears of the training steps.

    Whatever ends this function early ends the command too.

    Raises:
        LaunchFailed: the command's exit status is not 0.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        file.write(f"$ {' '.join(f'{k}={v}' for k, v in environment.items())} {shlex.join(command)}\n\n")
        file.flush()
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it in order
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                progress(step_reached(log))
        finally:
            stop(process)
    if process.returncode:
        end = end_of_log(log.read_text(errors="replace"))
        raise LaunchFailed(f"{end}\n\nThis launch failed with status {process.returncode}. Its whole output: {log}")


def stop(process: subprocess.Popen) -> None:
    """End ``process`` and the processes it started; nothing where it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def step_reached(log: Path) -> str:
    """How far the training in ``log`` is: "step 3 of 8", or "starting"."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        steps = _STEP.findall(file.read())
    return "step {} of {}".format(*(number.decode() for number in steps[-1])) if steps else "starting"


def end_of_log(text: str) -> str:
    """The last lines before torchrun's own account of the failure, which does not know its cause."""
    lines = text.rstrip().splitlines()
    end = next((i for i, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return "\n".join(lines[max(0, end - _LINES_OF_FAILURE) : end])
