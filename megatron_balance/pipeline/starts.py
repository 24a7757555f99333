"""Splits that are good before any search: what Megatron's own flags give, and the classic rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_balance.pipeline.case import Case

_HALVINGS = 40  # to a trillionth, well below what _filled lets pass


def megatron_splits(num_layers: int, num_stages: int) -> Iterator[np.ndarray]:
    """Megatron's uniform split, and those in which embedding, loss or both count as a layer."""
    for embedding in (0, 1):
        for loss in (0, 1):
            if num_stages > 1 and (num_layers + embedding + loss) % num_stages == 0:
                split = np.full(num_stages, (num_layers + embedding + loss) // num_stages)
                split[0] -= embedding
                split[-1] -= loss
                yield split


def starting_splits(case: Case) -> np.ndarray:
    """Layers of each stage for several splits within the limits of the layers, int64 of shape [count, stages]."""
    num_layers, stages = len(case.costs.layers), case.topology.num_stages
    least, _ = case.limits
    if stages == 1:
        return np.array([[num_layers]], dtype=np.int64)
    open_stages = case.mtp_stage + 1  # those behind multi-token prediction hold nothing
    splits = [
        _padded(split, stages)
        for split in (
            *_rows(num_layers, open_stages, case.topology.pipeline_size),
            *_smallest_maximum(case, open_stages),
        )
    ]
    splits = np.array([*megatron_splits(num_layers, stages), *splits, _front(num_layers, least)], dtype=np.int64)
    return np.unique(splits[case.admits(splits)], axis=0)


def _padded(split: np.ndarray, stages: int) -> np.ndarray:
    return np.pad(split, (0, stages - split.size))


def _front(num_layers: int, least: np.ndarray) -> np.ndarray:
    """As few layers as may be in all stages but the first, so that there is a start at all."""
    split = least.copy()
    split[0] += num_layers - split.sum()
    return split


def _rows(num_layers: int, stages: int, ranks: int) -> Iterator[np.ndarray]:
    """One level in all stages, the last stage lightened by so many layers, what is left over in turn to one row.

    It goes to the last chunk row's first ranks, faster and lighter in interleaved schedules than the first's, or to that.
    """
    turn = np.arange(stages)
    from_last_row = np.concatenate(
        [turn[stages - stages % ranks :], *(turn[: stages - stages % ranks].reshape(-1, ranks)[::-1])]
    )
    for relief in range(num_layers // max(stages - 1, 1) + 1):
        level = min((num_layers + relief) // stages, num_layers // max(stages - 1, 1))
        split = np.full(stages, level)
        split[-1] -= min(relief, level)
        left_over = num_layers - split.sum()
        if 0 <= left_over <= stages:
            for order in (from_last_row, turn):
                filled = split.copy()
                filled[order[:left_over]] += 1
                yield filled


def _smallest_maximum(case: Case, stages: int) -> Iterator[np.ndarray]:
    """Splits with the smallest possible largest stage, filled from the front and filled from the back."""
    least = case.limits[0][:stages]
    before = case.problem.before.sum(axis=0)
    ends = case.problem.ends[0].sum(axis=0)[:stages]
    too_small, cap = 0.0, float(before[-1] + ends.max())
    for _ in range(_HALVINGS):
        middle = (too_small + cap) / 2
        if _filled(before, ends, least, middle) is None:
            too_small = middle
        else:
            cap = middle
    yield _filled(before, ends, least, cap)
    yield _filled((before[-1] - before)[::-1], ends[::-1], least[::-1], cap)[::-1]


def _filled(before: np.ndarray, ends: np.ndarray, least: np.ndarray, cap: float) -> np.ndarray | None:
    """Stages filled in turn up to ``cap`` seconds, leaving the later ones what they need; None where that is too few.

    Args:
        before: seconds of the first 0, 1, ..., n layers.
        ends: seconds that embedding and head add to each stage.
        least: layers that each stage holds at least.
        cap: seconds; a billionth more is let pass, as sums in another order differ by less.
    """
    stops = [0]
    spare = before.size - 1 - least.sum()
    for extra, fewest in zip(ends, least, strict=True):
        start = stops[-1]
        room = cap * (1 + 1e-9) - extra
        fitting = np.searchsorted(before, before[start] + room, side="right") - 1 - start
        taken = min(fitting, fewest + spare)
        if taken < fewest:
            return None
        spare -= taken - fewest
        stops.append(start + taken)
    return np.diff(stops) if spare == 0 else None
