"""The jobs that are compared: their documents, their command lines, and starting them."""

from __future__ import annotations

import ast
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_balance.packing.cost import FIXED, VARIABLE
from megatron_balance.topology import Topology
from quickstart.corpus import Corpus, Document, build_corpus, read_documents, standard_library
from quickstart.launch import ENVIRONMENT, run
from quickstart.turns import Turns

OBSERVED = Path(__file__).with_name("observed.py")
STOCK, PACKED, PADDED = "stock", "packed", "padded"  # padded: packed, with fixed shapes
FILES, DEFINITIONS, MIXED = "files", "definitions", "mixed"
_LONG = 60_000  # bytes of a file, about 20,000 tokens
# One more pair of steps than counts, at either end: the first allocates, and beside the last the other job is ending.
WARMUP = 1

_OF_SIDE = {
    STOCK: ("--dataloader-inter-document-masking", "--no-create-attention-mask-in-dataloader"),
    PACKED: ("--varlen-packing", "--varlen-packing-shapes", VARIABLE),
    PADDED: ("--varlen-packing", "--varlen-packing-shapes", FIXED),
}


@dataclass(frozen=True)
class Case:
    """A model, its documents and how it is trained.

    Attributes:
        name: for the table.
        documents: `FILES`, a source file each; `DEFINITIONS`, a function or class of a file's top level each; `MIXED`, long files
            whole, of others the functions and classes: as where books are trained on beside short texts.
        sequence: tokens of a bin.
        pipeline, data: PP and DP.
        microbatches: of a step.
        pairs: steps of each side that count.
        workers: processes of a rank that load batches (``--num-workers``; Megatron's default is 2); 0 loads within the step.
        layers, hidden, heads, vocabulary: of the model. Its head takes about as long as a layer: in a pipeline of two the
            second stage has a layer less.
    """

    name: str
    documents: str
    sequence: int
    pipeline: int
    data: int
    microbatches: int
    pairs: int
    workers: int = 0
    layers: int = 5
    hidden: int = 64
    heads: int = 1
    vocabulary: int = 2048

    @property
    def processes(self) -> int:
        return self.pipeline * self.data

    @property
    def steps(self) -> int:
        return self.pairs + 2 * WARMUP

    @property
    def topology(self) -> Topology:
        return Topology(self.pipeline, self.microbatches, data_size=self.data)

    def with_pairs(self, pairs: int) -> Case:
        return replace(self, pairs=pairs)

    def flags(self, side: str) -> list[str]:
        """Megatron's flags of a side, without its data."""
        length, batch = self.sequence, self.data * self.microbatches
        split = ("--pipeline-model-parallel-layout", "Ettt|ttL") if self.pipeline == 2 else ()
        words = [
            *("--num-layers", self.layers, "--hidden-size", self.hidden, "--num-attention-heads", self.heads),
            *("--seq-length", length, "--max-position-embeddings", length, "--untie-embeddings-and-output-weights"),
            *("--attention-dropout", 0, "--hidden-dropout", 0, "--calculate-per-token-loss"),
            *("--micro-batch-size", 1, "--global-batch-size", batch, "--train-iters", self.steps),
            *("--lr", 3e-4, "--lr-decay-style", "constant", "--pipeline-model-parallel-size", self.pipeline, *split),
            *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", self.vocabulary, "--num-workers", self.workers),
            *("--log-interval", 1, "--eval-iters", 0, "--eval-interval", 1000, *_OF_SIDE[side]),
        ]
        return [str(word) for word in words]


@dataclass(frozen=True)
class Launcher:
    """Starts the jobs of a case; everything they write is in ``out``."""

    case: Case
    out: Path
    script: str | None = None
    device: str = "cpu"

    @property
    def seen(self) -> Path:
        return self.out / "seen"

    def compare(self, data: Path, order: Sequence[str], progress: Callable[[str], None]) -> None:
        """Train both sides, a step each in the turns of ``order``, every rank on a core of its own.

        Raises:
            LaunchFailed: a job ended with an error.
        """
        commands = {}
        for side in dict.fromkeys(order):
            turns = ["--turns", side, ",".join(order)]
            commands[self._log(side)] = self._command(self.seen / side, turns, self._with_data(side, data))
        first = Turns(self.seen, order, order[0], rank=0, processes=self.case.processes)
        run(commands, progress, follows=first.are_awaited)

    def alternate(self, data: Path, progress: Callable[[str], None]) -> None:
        """Train one packed job, each of its batches twice: with our forward step, and with the training script's own.

        Its learning rate is zero, so that both see the same weights.

        Raises:
            LaunchFailed: the job ended with an error.
        """
        flags = [*self._with_data(PADDED, data), "--lr", "0", "--weight-decay", "0", "--rerun-mode", "disabled"]
        run({self._log("both"): self._command(self.seen, ["--both"], flags)}, progress)

    def _with_data(self, side: str, data: Path) -> list[str]:
        return [
            *self.case.flags(side), *("--data-path", str(data), "--split", "100,0,0"),
            *("--data-cache-path", str(self.out / "data-cache")),
        ]  # fmt: skip

    def _log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def _command(self, folder: Path, how: Sequence[str], flags: Sequence[str]) -> list[str]:
        torchrun = [sys.executable, "-m", "quickstart.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += ["--monitor-interval", "2", "--nproc-per-node", str(self.case.processes)]
        script = [self.script] if self.script else []
        return [*torchrun, str(OBSERVED), str(folder), *how, "--", "--device", self.device, *script, *flags]


def environment(paths: Sequence[Path]) -> dict[str, str]:
    """Variables of the jobs: one thread a rank, and where Python finds us."""
    return {**ENVIRONMENT, "PYTHONPATH": ":".join(map(str, paths))}


def corpus(case: Case, tokens: int, out: Path, progress: Callable[[str], None]) -> Corpus:
    """The standard library's source text, at least ``tokens`` tokens where it has them, in documents as ``case`` wants them."""
    documents = read_documents(standard_library(), tokens * 4)
    if case.documents != FILES:
        longest = _LONG if case.documents == MIXED else math.inf
        documents = [
            part
            for document in documents
            for part in ([document] if len(document.text) >= longest else _definitions(document))
        ]
    return build_corpus(documents, case.vocabulary, out, progress)[0]


def _definitions(document: Document) -> list[Document]:
    """Functions and classes of a file's top level; none of a file that is not of this Python's language."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(document.text).body
    except (SyntaxError, ValueError):
        return []
    lines = document.text.splitlines(keepends=True)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        Document(f"{document.name}:{node.lineno}", "".join(lines[node.lineno - 1 : node.end_lineno]))
        for node in body
        if isinstance(node, kinds)
    ]
