"""Document lengths to pack: two log-normal sets that need no data, and the published lengths of a long-context job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from public_data import data_folder

RATIO = 49152.0  # a document of s tokens costs RATIO * s + s**2
DATA_SIZE = 16
_WLB = data_folder() / "lengths" / "wlb-like.json"


@dataclass(frozen=True)
class LengthSet:
    """Where lengths come from.

    Attributes:
        name: of the set.
        capacity: tokens of a bin; no document is longer.
        draw: documents drawn with a seed and their number.
        documents: in a batch.
        microbatches: of a batch of the product's own, about as many as those documents make.
    """

    name: str
    capacity: int
    draw: Callable[[int, int], np.ndarray]
    documents: int
    microbatches: int


def length_sets() -> tuple[LengthSet, ...]:
    """All sets whose data there are."""
    sets = [_log_normal("LN-32k", 1024, 1.4, 32768, 20), _log_normal("LN-128k", 4096, 1.5, 131072, 23)]
    return (*sets, _wlb()) if missing_data() is None else tuple(sets)


def missing_data() -> str | None:
    """Why a set is left out; None where none is."""
    return None if _WLB.is_file() else f"WLB left out: there is no {_WLB}; set MEGATRON_BALANCE_DATA"


def _log_normal(name: str, median: int, sigma: float, capacity: int, microbatches: int) -> LengthSet:
    def draw(seed: int, count: int) -> np.ndarray:
        lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
        return np.clip(lengths.round(), 16, capacity).astype(np.int64)

    return LengthSet(name, capacity, draw, 4096, microbatches)


def _wlb() -> LengthSet:
    values = json.loads(_WLB.read_text(encoding="utf-8"))
    lengths = np.array(values if isinstance(values, list) else next(iter(values.values())), dtype=np.int64)

    def draw(seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).choice(lengths, min(count, lengths.size), replace=False)

    return LengthSet("WLB", 131072, draw, 12288, 24)
