"""The jobs that are compared: their documents, their command lines, and starting them."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_balance.packing.cost import FIXED, VARIABLE
from megatron_balance.topology import Topology
from quickstart.corpus import Corpus, Document, build_corpus, read_documents, standard_library, train_tokenizer
from quickstart.launch import ENVIRONMENT, run, torchrun, traced
from quickstart.turns import Turns

OBSERVED = Path(__file__).with_name("observed.py")
STOCK, PACKED, PADDED = "stock", "packed", "padded"  # padded: packed, with fixed shapes
FILES, DEFINITIONS, MIXED, BLEND = "files", "definitions", "mixed", "blend"
_LONG = 60_000  # bytes of a file, about 20,000 tokens
_BLENDED_BYTES = 20_000_000  # to choose from
_BYTES = 2.2  # of a token of a small vocabulary
# Of long and short documents. Two of five steps give them to one of two ranks, two to the other: not always the same one.
_WEIGHTS = (0.4, 0.6)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
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
            whole, of others the functions and classes: as where books are trained on beside short texts; `BLEND`, two data sets,
            of long files and of functions.
        sequence: tokens of a bin.
        pipeline, data: PP and DP.
        microbatches: of a step.
        pairs: steps of each side that count.
        workers: processes of a rank that load batches (``--num-workers``; Megatron's default is 2); 0 loads within the step.
        layers, hidden, heads, vocabulary: of the model. Its head takes about as long as a layer: in a pipeline of two the
            second stage has a layer less.
        ffn: width of the MLPs; None for four times the hidden one.
        longest: tokens of a document at most: longer ones are cut into several; None for as they are.
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
    ffn: int | None = None
    longest: int | None = None

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
            *(("--ffn-hidden-size", self.ffn) if self.ffn else ()),
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
    """Starts the jobs of a case; everything they write is in ``out``.

    Attributes:
        case: what they train.
        out: a folder that is there.
        script: a checkout's pretrain_gpt.py; None for our own.
        device: "cpu" or "cuda".
        records: whether they record a trace each.
    """

    case: Case
    out: Path
    script: str | None = None
    device: str = "cpu"
    records: bool = False

    def trace(self, side: str) -> Path:
        """Folder for the trace of the steps that count, where they are recorded."""
        return self.out / "traces" / side

    @property
    def seen(self) -> Path:
        return self.out / "seen"

    def compare(self, data: Path | Sequence[str], order: Sequence[str], progress: Callable[[str], None]) -> None:
        """Train the sides in ``order``, a step each in their turns, every rank on a core of its own.

        Args:
            data: prefix of an indexed dataset, or the words of ``--data-path``.
            order: the side that trains a step, for each turn.
            progress: told how far it is.

        Raises:
            LaunchFailed: a job ended with an error.
        """
        commands = {}
        for side in dict.fromkeys(order):
            turns = ["--turns", side, ",".join(order)]
            flags = [*self._with_data(side, data), *self._traced(side)]
            commands[self._log(side)] = self._command(self.seen / side, turns, flags)
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

    def _with_data(self, side: str, data: Path | Sequence[str]) -> list[str]:
        words = [str(data)] if isinstance(data, Path) else data
        return [
            *self.case.flags(side), *("--data-path", *words, "--split", "100,0,0"),
            *("--data-cache-path", str(self.out / "data-cache")),
        ]  # fmt: skip

    def _traced(self, side: str) -> list[str]:
        return [str(word) for word in traced(self.trace(side), WARMUP, self.case.steps)] if self.records else []

    def _log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def _command(self, folder: Path, how: Sequence[str], flags: Sequence[str]) -> list[str]:
        script = [self.script] if self.script else []
        target = [OBSERVED, folder, *how, "--", "--device", self.device, *script, *flags]
        return [str(word) for word in (*torchrun(self.case.processes), *target)]


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


def blend(case: Case, tokens: int, out: Path, progress: Callable[[str], None]) -> list[str]:
    """The standard library's long files, and functions of the others, about ``tokens`` tokens; the words of ``--data-path``.

    Megatron deals from both by weight, whole bins of one after the other: a common blend, of books and short texts say.
    """
    files = read_documents(standard_library(), _BLENDED_BYTES)
    sources = (
        (file for file in files if len(file.text) >= _LONG),
        (part for file in files if len(file.text) < _LONG for part in _functions(file)),
    )
    limits = (weight * tokens * _BYTES for weight in _WEIGHTS)
    parts = [list(_up_to(source, limit)) for source, limit in zip(sources, limits, strict=True)]
    tokenizer = train_tokenizer([document.text for part in parts for document in part], case.vocabulary - 1)
    corpora = (build_corpus(part, case.vocabulary, out, progress, case.longest, tokenizer)[0] for part in parts)
    return [word for weight, one in zip(_WEIGHTS, corpora, strict=True) for word in (str(weight), str(one.prefix))]


def _up_to(documents: Iterable[Document], limit_bytes: float) -> Iterator[Document]:
    size = 0
    for document in documents:
        if size >= limit_bytes:
            return
        size += len(document.text)
        yield document


def _definitions(document: Document) -> list[Document]:
    """Functions and classes of a file's top level."""
    return _texts(document, (node for node in _body(document) if isinstance(node, (*_FUNCTIONS, ast.ClassDef))))


def _functions(document: Document) -> list[Document]:
    """Functions of a file's top level, and methods of its classes."""
    bodies = (node.body if isinstance(node, ast.ClassDef) else [node] for node in _body(document))
    return _texts(document, (node for body in bodies for node in body if isinstance(node, _FUNCTIONS)))


def _body(document: Document) -> list[ast.stmt]:
    """Of a file; nothing of one that is not of this Python's language."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(document.text).body
    except (SyntaxError, ValueError):
        return []


def _texts(document: Document, nodes: Iterable[ast.stmt]) -> list[Document]:
    lines = document.text.splitlines(keepends=True)
    return [
        Document(f"{document.name}:{node.lineno}", "".join(lines[node.lineno - 1 : node.end_lineno])) for node in nodes
    ]
