"""A real corpus that every machine has: the source files of the interpreter's standard library, one document each."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

_FORMAT = 1  # part of the key: raise it when the same documents give other files
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
_BATCH = 64  # documents encoded at once


@dataclass(frozen=True)
class Document:
    """One source file: its path below the root, in POSIX notation, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus on disk.

    Attributes:
        folder: where `tokens.bin`, `tokens.idx` (a Megatron indexed dataset) and `tokenizer.json` are.
        documents, text_bytes, tokens: their numbers; tokens count the mark after each document.
        learned: entries of the tokenizer's vocabulary.
    """

    folder: Path
    documents: int
    text_bytes: int
    tokens: int
    learned: int

    @property
    def prefix(self) -> Path:
        """What Megatron's `--data-path` takes."""
        return self.folder / "tokens"


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def read_documents(root: Path, limit_bytes: int) -> list[Document]:
    """The `*.py` files below ``root`` without installed packages, in an order that depends on their names alone.

    The order is a fixed shuffle, so that the files up to ``limit_bytes`` are a fair sample and a training run does not
    see one package after the other. Empty files, and the few that are not UTF-8 (test data), are left out.
    """
    names = sorted(_source_files(root), key=lambda name: hashlib.sha256(name.encode()).digest())
    documents, size = [], 0
    for name in names:
        if size >= limit_bytes:
            break
        content = (root / name).read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents.append(Document(name, text))
            size += len(content)
    return documents


def _source_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOREIGN]
        for name in files:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def corpus_key(documents: list[Document], vocabulary: int, longest: int | None = None) -> str:
    """A name for what `build_corpus` makes of ``documents``: equal inputs, equal key."""
    digest = hashlib.sha256(f"{_FORMAT} {vocabulary} {longest}".encode())
    for document in documents:
        for part in (document.name.encode(), document.text.encode()):
            digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()[:16]


def build_corpus(
    documents: list[Document],
    vocabulary: int,
    out: Path,
    progress: Callable[[str], None] = lambda text: None,
    longest: int | None = None,
) -> tuple[Corpus, bool]:
    """Tokenize ``documents`` into a folder of ``out`` that is named after their content, unless it is there already.

    Token ids are below ``vocabulary``; the last one marks the end of a document, as Megatron's NullTokenizer has it.
    The folder appears at once and complete: a process killed on the way leaves only a temporary folder, which the next
    call removes. ``out`` must belong to one process at a time. What has more than ``longest`` tokens becomes several
    documents.

    Returns:
        The corpus, and whether it was built now.
    """
    folder = out / f"corpus-{corpus_key(documents, vocabulary, longest)}"
    for remains in out.glob(".corpus-*"):
        shutil.rmtree(remains)
    if not folder.exists():
        temporary = Path(tempfile.mkdtemp(dir=out, prefix=".corpus-"))
        _write_corpus(documents, vocabulary, temporary, progress, longest)
        temporary.chmod(0o755)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        temporary.rename(folder)
        _sync(out)
        return _load(folder), True
    return _load(folder), False


def _load(folder: Path) -> Corpus:
    return Corpus(folder, **json.loads((folder / "corpus.json").read_text()))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_corpus(
    documents: list[Document], vocabulary: int, folder: Path, progress: Callable[[str], None], longest: int | None
) -> None:
    indexed_dataset = _indexed_dataset()
    texts = [document.text for document in documents]
    progress(f"training a tokenizer on {len(texts)} files")
    tokenizer = train_tokenizer(texts, vocabulary - 1)
    dtype = indexed_dataset.DType.optimal_dtype(vocabulary)
    builder = indexed_dataset.IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=dtype)
    lengths = []
    for start in range(0, len(texts), _BATCH):
        progress(f"tokenizing file {start} of {len(texts)}")
        for encoding in tokenizer.encode_batch(texts[start : start + _BATCH]):
            for part in _cut(encoding.ids, longest):
                ids = [*part, vocabulary - 1]
                builder.add_document(ids, [len(ids)])
                lengths.append(len(ids))
    builder.finalize(str(folder / "tokens.idx"))
    tokenizer.save(str(folder / "tokenizer.json"))
    text_bytes = sum(len(text.encode()) for text in texts)
    corpus = asdict(Corpus(folder, len(lengths), text_bytes, sum(lengths), tokenizer.get_vocab_size()))
    del corpus["folder"]
    (folder / "corpus.json").write_text(json.dumps(corpus))


def _cut(ids: list[int], longest: int | None) -> list[list[int]]:
    """Parts that are no longer than ``longest`` with the mark behind them."""
    size = max(1, len(ids)) if longest is None else longest - 1
    return [ids[start : start + size] for start in range(0, max(1, len(ids)), size)]


def _indexed_dataset() -> ModuleType:
    """Megatron's module, imported without the warnings about optional packages that this does not need."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def train_tokenizer(texts: list[str], size: int):
    """A byte-level BPE tokenizer (`tokenizers.Tokenizer`) with at most ``size`` entries: fewer for a very small text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=0,  # whatever it takes to fill a vocabulary that is large for this text
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
