"""Which documents of a data set are for training, validation and test: Megatron's ``--split``."""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise

import numpy as np

from megatron_balance.errors import BalanceError

MEGATRONS_SPLIT = "969, 30, 1"  # what Megatron takes where --data-path comes without --split
Part = tuple[float, float]  # shares of the documents at which it begins and ends
ALL: Part = (0.0, 1.0)
_NUMBERS = re.compile(r"[.0-9]+")
_SPLITS = 3


def parts_of(split: str) -> tuple[Part | None, ...]:
    """The parts of training, validation and test, None for an empty one.

    As ``parse_and_normalize_split`` and ``convert_split_vector_to_split_matrix`` of Megatron's
    ``blended_megatron_dataset_config.py`` read it, to the last bit: what is no digit or dot stands between numbers, those that
    are missing are 0, and only their proportions matter.

    Raises:
        BalanceError: there are more than three numbers, or none above 0, or one is no number.
    """
    try:
        given = [float(number) for number in _NUMBERS.findall(split)]
    except ValueError:  # 1.2.3
        given = []
    if len(given) > _SPLITS or not 0 < sum(given) < math.inf:
        raise BalanceError(
            f"--split {split}: give the proportions of training, validation and test as up to three numbers with commas"
            f" between them, such as {MEGATRONS_SPLIT.replace(' ', '')}"
        )
    numbers = np.array(given + [0.0] * (_SPLITS - len(given)))
    shares = (numbers / np.sum(numbers)).tolist()  # Python's own sum of floats is another from 3.12 on
    return tuple(part if part[0] < part[1] else None for part in pairwise(accumulate(shares, initial=0)))


def train_part(split: str) -> Part:
    """The part of training.

    Raises:
        BalanceError: as `parts_of`; or there is none.
    """
    part = parts_of(split)[0]
    if part is None:
        raise BalanceError(f"--split {split} leaves nothing for training: its first number must be above 0")
    return part


def bounds(documents: int, part: Part) -> tuple[int, int]:
    """First document of a part and the one behind its last, rounded as Megatron's builder does."""
    first, stop = (round(share * float(documents)) for share in part)
    return first, stop
