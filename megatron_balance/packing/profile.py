"""The cost that each micro-batch of a step aims at: tuned with the schedule's simulator on a few batches, then kept.

Under 1F1B it is a hump over the step, small at both ends and deliberately higher than can be reached; interleaved, Megatron runs
micro-batches in groups, and so the targets go by groups. It depends on the lengths, the schedule and the costs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.files import write_atomically
from megatron_balance.packing.bins import Load, fill_bins
from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.cut import batches
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.step import judge_of, micro_batch_s
from megatron_balance.packing.stream import Stream
from megatron_balance.reading import (
    DamageError,
    check_format,
    check_keys,
    checked,
    flag,
    number,
    numbers,
    optional,
    parse_object,
)
from megatron_balance.topology import Topology

FORMAT, FORMAT_VERSION = "megatron-balance packing profile", 1

_KNOTS = 12  # of a hump; also the most groups of micro-batches with targets of their own
_GROUPS = (0.6, 1.4, 1.0)  # first, middle and last group: what to begin with
# Where the plateau of a hump begins and ends, its height, and alpha: what to begin with.
_HUMPS = ((0.45, 0.75, 4.0, 8.0), (0.25, 0.65, 3.0, 5.0), (0.1, 0.4, 2.0, 4.0), (0.3, 0.7, 1.6, 2.0))
_ENDS = 0.2
_ALPHA = 2.0
# How many profiles go on after each round of the search, and how often each is varied in it.
_ROUNDS = ((4, 90), (2, 150), (1, 340))
_FIRST_STRIDE, _LAST_STRIDE = 0.6, 0.06  # relative changes
_FITS_NOT = 1e3  # step over ideal of a batch whose pieces did not fit
_SEED = 5
_RANKS = 16  # data-parallel ones that a profile is tuned for, where there are more
_MOST_SAMPLES = 4  # global batches that a profile is tuned on
_PIECES = 12_000  # that they have together, about


@dataclass(frozen=True)
class Profile:
    """Target costs of the micro-batches of a step, and how much a rank's total weighs against them.

    Attributes:
        knots: targets in units of the mean micro-batch, at equal distances over the step.
        alpha: weight of what a rank still lacks of its share, for each micro-batch.
        by_group: the targets go by groups of micro-batches (interleaved schedules), not by single ones.
        step_over_ideal: simulated step over that of ranks that never wait, mean of the batches it was tuned on; None where
            it was not tuned.
    """

    knots: tuple[float, ...]
    alpha: float = _ALPHA
    by_group: bool = False
    step_over_ideal: float | None = None

    def targets(self, topology: Topology) -> np.ndarray:
        """Target of each micro-batch in units of the mean one, shape [M]; made for another M, stretched over this one."""
        size = topology.group_size if self.by_group else 1
        groups = -(-topology.num_microbatches // size)
        heights = np.interp(_spread(groups), _spread(len(self.knots)), self.knots)
        return np.repeat(heights, size)[: topology.num_microbatches]


def tuning_grid(grid: Grid) -> Grid:
    """The grid that a profile is tuned for: some data-parallel ranks, whole lockstep groups of them, stand for thousands."""
    topology, group = grid.topology, grid.lockstep_size
    ranks = max(group, _RANKS // group * group)
    if topology.data_size <= ranks:
        return grid
    return replace(grid, topology=replace(topology, data_size=ranks))


def tuning_samples(stream: Stream, num_bins: int) -> list[np.ndarray]:
    """Tokens of the pieces of the first global batches, as many as take seconds: what a profile is tuned on.

    Args:
        num_bins: of the ``tuning_grid``.

    They follow from the data, the seed and the rule, so that with the same costs `megatron-balance pack` and training find each
    other's profile in the cache.
    """
    first = [batch.pieces.tokens for batch in batches(stream, stream.start, [num_bins] * _MOST_SAMPLES)]
    return first[: max(1, _PIECES // first[0].size)]


def tune(
    samples: Sequence[np.ndarray],
    bin_cost: BinCost,
    rule: PieceRule,
    grid: Grid | Sequence[Grid],
    advance: Callable[[float], None] = lambda share: None,
) -> Profile:
    """The profile of the shortest simulated steps on a few global batches: random search, from the best of several starts.

    Deterministic, and takes seconds.

    Args:
        samples: tokens of the pieces of each global batch, each of shape [pieces].
        bin_cost: seconds of a bin.
        rule: capacity of the bins and alignment of the pieces.
        grid: where the bins are run; one for each sample where they have different numbers of micro-batches.
        advance: told of each part of the work that it is done, as a share of all.

    Raises:
        BalanceError: Megatron would refuse the schedule, or a batch has fewer pieces than bins.
    """
    grids = [grid] * len(samples) if isinstance(grid, Grid) else list(grid)
    loads = [(Load.of(tokens, bin_cost, rule), each) for tokens, each in zip(samples, grids, strict=True)]
    for load, each in loads:
        each.check_filled_by(load.room.size)
    kept = [_judged(start, loads) for start in _starts(grids[0].topology)]
    rounds = [(min(most, len(kept)), trials) for most, trials in _ROUNDS]
    trials_in_all = sum(most * trials for most, trials in rounds)
    draw = np.random.RandomState(_SEED).random_sample  # the one stream that numpy promises never to change
    for turn, (most, trials) in enumerate(rounds):
        kept = sorted(kept, key=_step)[:most]
        for place, profile in enumerate(kept):
            for trial in range(trials):
                cooled = (turn + trial / trials) / len(rounds)
                varied = _varied(profile, _FIRST_STRIDE + (_LAST_STRIDE - _FIRST_STRIDE) * cooled, draw)
                profile = min(profile, _judged(varied, loads), key=_step)
                advance(1 / trials_in_all)
            kept[place] = profile
    return min(kept, key=_step)


def _starts(topology: Topology) -> list[Profile]:
    if topology.virtual_size > 1:
        groups = min(_KNOTS, -(-topology.num_microbatches // topology.group_size))
        return [Profile(tuple(np.interp(_spread(groups), (0.0, 0.5, 1.0), _GROUPS).tolist()), by_group=True)]
    return [
        Profile(tuple(np.interp(_spread(_KNOTS), (0.0, rise, fall, 1.0), (_ENDS, top, top, _ENDS)).tolist()), alpha)
        for rise, fall, top, alpha in _HUMPS
    ]


def _varied(profile: Profile, stride: float, draw: Callable[[], float]) -> Profile:
    """The profile with another bump, height or alpha."""
    knots = np.array(profile.knots)
    kind, change = draw(), 2.0 * stride * (draw() + draw() - 1.0)
    center, width = draw(), 0.06 + 0.9 * draw() ** 2
    bump = np.maximum(0.0, 1.0 - ((_spread(knots.size) - center) / width) ** 2)
    if kind < 0.4:
        knots = np.maximum(0.0, knots + change * bump)
    elif kind < 0.8:
        knots *= np.maximum(0.1, 1.0 + change * bump)
    elif kind < 0.9:
        knots *= max(0.1, 1.0 + 0.5 * change)
    alpha = profile.alpha * max(0.1, 1.0 + change) if kind >= 0.9 else profile.alpha
    return replace(profile, knots=tuple(knots.tolist()), alpha=alpha)


def _judged(profile: Profile, loads: Sequence[tuple[Load, Grid]]) -> Profile:
    """The profile with its mean step over ideal on the loads."""
    sum_of = 0.0
    for load, grid in loads:
        bins = fill_bins(load, grid, profile.targets(grid.topology), profile.alpha)
        if bins is None:
            sum_of += _FITS_NOT
        else:
            sum_of += judge_of(grid).step_over_ideal(micro_batch_s(bins, load.piece_s, load.empty_s, grid))
    return replace(profile, step_over_ideal=sum_of / len(loads))


def _step(profile: Profile) -> float:
    return profile.step_over_ideal


def _spread(count: int) -> np.ndarray:
    """Places of ``count`` points over [0, 1], the ends included; one alone lies in the middle."""
    return np.arange(count) / (count - 1) if count > 1 else np.array([0.5])


def load_or_tune(
    cache_folder: str | Path | None,
    samples: Sequence[np.ndarray],
    bin_cost: BinCost,
    rule: PieceRule,
    grid: Grid,
    advance: Callable[[float], None] = lambda share: None,
) -> Profile:
    """The profile that ``tune`` found for the same samples, costs and grid before, or finds now and keeps.

    A damaged file is tuned anew; a folder that cannot be written is done without.
    """
    if cache_folder is None:
        return tune(samples, bin_cost, rule, grid, advance)
    key = profile_key(samples, bin_cost, rule, grid)
    file = Path(cache_folder) / f"profile-{key[:32]}.json"
    with contextlib.suppress(OSError, UnicodeDecodeError, DamageError):
        return from_json(file.read_text(encoding="utf-8"), key)
    profile = tune(samples, bin_cost, rule, grid, advance)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_json(profile, key))
    return profile


def profile_key(samples: Sequence[np.ndarray], bin_cost: BinCost, rule: PieceRule, grid: Grid) -> str:
    """Hexadecimal digest of all that a profile depends on, this file's format included."""
    digest = hashlib.sha256(repr((FORMAT_VERSION, bin_cost, rule, grid)).encode())
    for tokens in samples:
        digest.update(np.sort(tokens).astype("<i8").tobytes())
        digest.update(b"/")
    return digest.hexdigest()


def to_json(profile: Profile, key: str) -> str:
    """The profile as text, under the key of what it was tuned for."""
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, "key": key, **vars(profile)}
    values["knots"] = list(profile.knots)
    return json.dumps({**values, "crc32": _checksum(values)}, indent=1) + "\n"


def from_json(content: str, key: str) -> Profile:
    """The profile that ``to_json`` wrote.

    Raises:
        DamageError: the text is no whole profile, or one of another version or key.
    """
    values = parse_object(content)
    check_format(values, FORMAT, FORMAT_VERSION, "a packing profile")
    check_keys(values, ("format", "format_version", "key", "knots", "alpha", "by_group", "step_over_ideal", "crc32"))
    checksum = values.pop("crc32")
    checked(values["key"], "key", values["key"] == key, f"{key[:8]}..., for which it is looked up")
    knots = numbers(values["knots"], "knots")
    checked(knots, "knots", len(knots) > 0, "at least one number")
    profile = Profile(
        knots,
        number(values["alpha"], "alpha"),
        flag(values["by_group"], "by_group"),
        optional(number)(values["step_over_ideal"], "step_over_ideal"),
    )
    checked(checksum, "crc32", checksum == _checksum(values), "that of its content")
    return profile


def _checksum(values: dict[str, Any]) -> int:
    """Of a file: one digit that flips would place all documents differently, and nobody would notice."""
    return zlib.crc32(json.dumps(values).encode())
