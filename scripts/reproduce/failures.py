"""The failures that are reproduced: on which text, and how a job that has one is trained, alone or in turns with a mended one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quickstart.corpus import build_corpus, read_documents, standard_library
from quickstart.launch import Job, Size
from quickstart.packed.jobs import PACKED, STOCK, Launcher, blend
from quickstart.report import BALANCED, UNIFORM
from quickstart.session import Progress
from quickstart.sizes import CORPUS_BYTES, packed_case, packed_tokens, split_size
from quickstart.turns import order_of_turns

from megatron_balance.diagnosis.result import SEQUENCE_LENGTHS, STAGE_SPLIT

Data = Path | Sequence[str]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: for all that it writes; not there yet.
        data: prefix of an indexed dataset, or the words of ``--data-path``.
        device: "cpu" or "cuda".
        pairs: steps of each job that count.
        mends: whether a mended job trains in turns with the stock one.
    """

    folder: Path
    data: Data
    device: str
    pairs: int
    mends: bool


@dataclass(frozen=True)
class Failure:
    """One failure.

    Attributes:
        cause: as the diagnosis names it.
        job: the stock job that has it.
        fix: the flags that mend it.
        text: makes the dataset in a folder, for a device and so many steps in turns that count; returns what a ``Run`` takes.
        train: trains; returns the traces, first the stock job's.
        pairs, quick_pairs: steps that count, of the stock job alone, and of each job in turns.
    """

    cause: str
    job: str
    fix: str
    text: Callable[[Path, str, int, Progress], Data]
    train: Callable[[Run, Progress], tuple[Path, ...]]
    pairs: tuple[int, int]
    quick_pairs: tuple[int, int]


def _text_of_files(out: Path, device: str, pairs: int, progress: Progress) -> Path:
    documents = read_documents(standard_library(), CORPUS_BYTES)
    return build_corpus(documents, _size(device).vocabulary, out, progress)[0].prefix


def _size(device: str) -> Size:
    """With a head that leaves stages of whole layers even: what is left of the bubble is then no split's."""
    return replace(split_size(device), vocabulary=57_344 if device == "cuda" else 14_336)


def _train_split(run: Run, progress: Progress) -> tuple[Path, ...]:
    size = replace(_size(run.device), pairs=run.pairs)
    job = Job(size, run.device, run.data, run.folder, from_scratch=True)
    job.logs.mkdir(parents=True)
    order = order_of_turns(BALANCED, UNIFORM, size.steps) if run.mends else [UNIFORM] * size.steps
    job.compare(order, progress)
    return tuple(job.trace(split) for split in (UNIFORM, BALANCED)[: 1 + run.mends])


def _blend(out: Path, device: str, pairs: int, progress: Progress) -> Data:
    case = packed_case(device).with_pairs(pairs)
    return blend(case, packed_tokens(case), out, progress)


def _train_lengths(run: Run, progress: Progress) -> tuple[Path, ...]:
    case = packed_case(run.device).with_pairs(run.pairs)
    launcher = Launcher(case, run.folder, device=run.device, records=True)
    launcher.out.mkdir()
    order = order_of_turns(STOCK, PACKED, case.steps) if run.mends else [STOCK] * case.steps
    launcher.compare(run.data, order, progress)
    return tuple(launcher.trace(side) for side in (STOCK, PACKED)[: 1 + run.mends])


FAILURES = {
    "stage": Failure(
        STAGE_SPLIT,
        "uniform split, large vocabulary, two pipeline stages",
        "--balanced-pipeline",
        _text_of_files,
        _train_split,
        pairs=(6, 10),
        quick_pairs=(3, 4),
    ),
    "length": Failure(
        SEQUENCE_LENGTHS,
        "long and short documents, chopped, two data-parallel ranks",
        "--varlen-packing",
        _blend,
        _train_lengths,
        pairs=(10, 20),  # the blend repeats itself every fifth step
        quick_pairs=(5, 10),
    ),
}
