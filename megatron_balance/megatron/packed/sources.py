"""Where the documents of a packed job come from: the data sets of each split, as Megatron's command line names them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_balance.megatron.packed.options import trains_on_conversations
from megatron_balance.packing.documents import Documents, read_indexed
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.splits import ALL, MEGATRONS_SPLIT, Part, bounds, parts_of


@dataclass(frozen=True, eq=False)
class Source:
    """Documents of one data set, and what reads their tokens.

    Attributes:
        documents: their lengths.
        data: what holds their tokens, with ``get`` as Megatron's low-level data set has it.
        first: number there of the first of them.
    """

    documents: Documents
    data: Any
    first: int

    def get(self, document: int, offset: int, length: int) -> np.ndarray:
        """``length`` tokens of a document from ``offset`` on."""
        return self.data.get(self.first + document, offset, length)

    def counted(self, document: int, offset: int, length: int) -> np.ndarray | bool:
        """Which of ``length`` tokens of a document from ``offset`` on are to be learned: bool, for all or of shape [length]."""
        return True

    def notes(self, rule: PieceRule) -> list[str]:
        """What else is to be said of them when training starts."""
        return []


@cache
def sources_of(split: Split) -> tuple[tuple[Source, float | None], ...]:
    """The data sets of a split with their weights (None: by their tokens); empty where there are none."""
    args = get_args()
    if args.mock_data:
        found = [(None, None)]
        whole = False
    else:
        blend, per_split = get_blend_and_blend_per_split(args)
        whole = blend is None
        blend = per_split[split.value] if whole else blend
        if blend is None:
            return ()
        prefixes, weights = blend
        found = list(zip(prefixes, weights or [None] * len(prefixes), strict=True))
    part = ALL if whole else parts_of(args.split or MEGATRONS_SPLIT)[split.value]
    if part is None:
        return ()
    return tuple((_source(prefix, part), weight) for prefix, weight in found)


def _source(prefix: str | None, part: Part) -> Source:
    if trains_on_conversations(get_args()):
        from megatron_balance.megatron.packed.conversations import source

        return source(prefix, part)
    data, name = _low_level(prefix), prefix or "mock data"
    first, stop = bounds(len(data.sequence_lengths), part)
    return Source(Documents.of(name, np.asarray(data.sequence_lengths)[first:stop]), data, first)


@cache
def _low_level(prefix: str | None) -> Any:
    if prefix is None:
        return MockGPTLowLevelDataset(get_tokenizer())
    if not IndexedDataset.exists(prefix):
        prefix = read_indexed(prefix).name  # given with an ending; else the error says what is there instead
    return IndexedDataset(prefix, multimodal=False, mmap=get_args().mmap_bin_files)
