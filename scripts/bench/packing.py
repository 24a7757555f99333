#!/usr/bin/env python3
"""How good and how fast packing is: others' packers beside this one, on the same documents, by exact simulation.

Figures are the step over one in which no rank ever waits, mean of the seeds (smallest to largest); a document of s tokens costs
49152 s + s^2, backward twice forward, the stages are equal, communication is free. Profiles are tuned on other seeds. Exits with 1
if a target is not reached; data and peers that are not there are named and do not fail it.

    python scripts/bench/packing.py [--only TEXT] [--set TEXT] [--quick] [--markdown]

Others' packers run where Python finds them, each as itself. ``pip install 'megatron_balance[bench]'`` brings TRL, verl and NeMo,
best into an environment of its own. OpenRLHF asks for a CUDA build: ``pip install --no-deps openrlhf pylatexenc``. slime is in no
package index: put a checkout of github.com/THUDM/slime on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # run from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from packing_peers import Batch, peers  # noqa: E402
from packing_sets import DATA_SIZE, RATIO, LengthSet, length_sets, missing_data  # noqa: E402
from tables import print_table  # noqa: E402

from megatron_balance.packing import kernels  # noqa: E402
from megatron_balance.packing.baselines import Packed, first_fit  # noqa: E402
from megatron_balance.packing.bins import first_fit_bins  # noqa: E402
from megatron_balance.packing.bound import lower_bound_s  # noqa: E402
from megatron_balance.packing.cost import FIXED, VARIABLE, BinCost, SequenceCost  # noqa: E402
from megatron_balance.packing.cut import batches  # noqa: E402
from megatron_balance.packing.documents import Blend, Documents  # noqa: E402
from megatron_balance.packing.grid import Grid  # noqa: E402
from megatron_balance.packing.pieces import PieceRule  # noqa: E402
from megatron_balance.packing.placement import EVALUATIONS, place  # noqa: E402
from megatron_balance.packing.profile import Profile, tune  # noqa: E402
from megatron_balance.packing.step import judge_of, micro_batch_s  # noqa: E402
from megatron_balance.packing.stream import Stream  # noqa: E402
from megatron_balance.topology import Topology  # noqa: E402

SEEDS, TUNED_ON = (100, 101, 102, 103, 104), (0, 1, 2)
FIRST_FIT, OURS = "first-fit, equal ranks, small ends", "this plan"
IMPROVED = {  # simulated steps of a rank, to improve a placement with
    "this plan, profile alone": 0,
    OURS: EVALUATIONS,
    "this plan, 50 ms": 15_000,
}
EQUAL, BOUND = "equal bins, if there were such", "lower bound"
MOST_MS = 10.0
LEAST_DOCUMENTS_PER_S = 2e6
ROUNDING = 1e-9


@dataclass(frozen=True)
class Section:
    """A table.

    Attributes:
        name: heading.
        pipeline_size, virtual_size: of the schedule.
        microbatches: as given; None as first-fit needs.
        shapes: of micro-batches.
        cut: the batches are the product's own, from its stream of documents.
        peers: whether others run, too.
        targets: of this plan on each set.
        below_first_fit: whether this plan has to be below first-fit everywhere.
    """

    name: str
    pipeline_size: int = 8
    virtual_size: int = 1
    microbatches: int | None = None
    shapes: str = VARIABLE
    cut: bool = False
    peers: bool = False
    targets: tuple[tuple[str, float], ...] = ()
    below_first_fit: bool = True


SECTIONS = (
    Section("PP8, 1F1B", peers=True, targets=(("LN-32k", 1.34), ("LN-128k", 1.38), ("WLB", 1.54))),
    Section("PP8, own batches", cut=True, targets=(("LN-32k", 1.345), ("LN-128k", 1.385), ("WLB", 1.55))),
    Section(
        "PP8, interleaved v=2, M=24",
        virtual_size=2,
        microbatches=24,
        targets=(("LN-32k", 1.13), ("LN-128k", 1.17), ("WLB", 1.28)),
    ),
    Section("PP4, 1F1B", pipeline_size=4),
    Section("PP8, 1F1B, fixed shapes", shapes=FIXED),
)
SPEED = "speed of the cut"


@dataclass(frozen=True)
class Figures:
    """Of one packer on one set, for each seed.

    Attributes:
        over_ideal: step over ideal.
        ms: processor milliseconds to pack a batch.
        over_capacity: tokens of the fullest bin over its capacity.
        ranks: cost of the costliest data-parallel rank over the mean.
        below_bound: whether some step that keeps to bins and capacity is below the lower bound.
    """

    over_ideal: tuple[float, ...]
    ms: tuple[float, ...] = ()
    over_capacity: float | None = None
    ranks: float | None = None
    below_bound: bool = False

    @property
    def mean(self) -> float:
        return float(np.mean(self.over_ideal))

    def __str__(self) -> str:
        spread = f" ({min(self.over_ideal):.3f}-{max(self.over_ideal):.3f})" if len(self.over_ideal) > 1 else ""
        return f"{self.mean:.3f}{spread}"


Row = dict[str, Figures]  # by set


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    sections = [section for section in SECTIONS if options.only.lower() in section.name.lower()]
    speed = options.only.lower() in SPEED
    if not sections and not speed:
        print(f"no table has {options.only!r} in its name", file=sys.stderr)
        return 2
    aside = sys.stderr if options.markdown else sys.stdout
    sets = [lengths for lengths in length_sets() if options.set.lower() in lengths.name.lower()]
    if not sets:
        print(f"no set of lengths has {options.set!r} in its name. {missing_data() or ''}", file=sys.stderr)
        return 2
    seeds = SEEDS[:1] if options.quick else SEEDS
    missed: list[str] = []
    for section in sections:
        absent = {peer.name: peer.missing for peer in peers() if section.peers and peer.pack is None}
        rows = _run(section, sets, seeds)
        print(f"**{section.name}**\n")
        _print_rows(section, rows, sets, tuple(absent))
        print(flush=True)
        for name, reason in absent.items():
            print(f"{name}: {reason}", file=aside)
        missed += _missed(section, rows)
    if speed:
        missed += _show_speed(sets)
    if (reason := missing_data()) is not None:
        print(reason, file=aside)
    print("\n".join([f"NOT REACHED: {line}" for line in missed]) if missed else "all reached", file=aside)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="tables that have TEXT in their name")
    parser.add_argument("--set", default="", metavar="TEXT", help="sets of lengths that have TEXT in their name")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--markdown", action="store_true", help="the tables alone, for the README")
    return parser


# --- a table


def _run(section: Section, sets: Sequence[LengthSet], seeds: Sequence[int]) -> dict[str, Row]:
    """Figures of every packer on every set."""
    others = peers() if section.peers else ()
    packers: dict[str, Callable[[Batch], Packed]] = {peer.name: peer.pack for peer in others if peer.pack is not None}
    packers[FIRST_FIT] = lambda batch: first_fit(batch.tokens, batch.bin_cost, batch.rule, batch.grid)
    rows: dict[str, Row] = {name: {} for name in (*packers, *IMPROVED, EQUAL, BOUND)}
    for lengths in sets:
        profile = _profile(section, lengths)
        for name, evaluations in IMPROVED.items():
            packers[name] = partial(_ours, profile, evaluations)
        given = [_batch(section, lengths, seed) for seed in seeds]
        bounds = [lower_bound_s(each.tokens, each.bin_cost, each.rule, each.grid) for each in given]
        for name, pack in packers.items():
            rows[name][lengths.name] = _figures(pack, given, bounds, repeats=3 if name in (FIRST_FIT, *IMPROVED) else 1)
        rows[EQUAL][lengths.name] = Figures(tuple(_equal(each.grid.topology) for each in given))
        ideals = [_ideal_s(each) for each in given]
        rows[BOUND][lengths.name] = Figures(tuple(np.divide(bounds, ideals).tolist()))
    return rows


@cache
def _profile(section: Section, lengths: LengthSet) -> Profile:
    given = [_batch(section, lengths, seed) for seed in TUNED_ON]
    return tune([each.tokens for each in given], given[0].bin_cost, given[0].rule, [each.grid for each in given])


def _batch(section: Section, lengths: LengthSet, seed: int) -> Batch:
    rule = PieceRule(lengths.capacity)
    if section.cut:
        tokens, microbatches = _own_batch(lengths, seed), lengths.microbatches
    else:
        tokens = lengths.draw(seed, lengths.documents)
        bins = int(first_fit_bins(tokens, lengths.capacity).max()) + 1
        microbatches = section.microbatches or -(-bins // DATA_SIZE)
    topology = Topology(section.pipeline_size, microbatches, section.virtual_size, data_size=DATA_SIZE)
    bin_cost = BinCost(SequenceCost.of_ratio(RATIO), lengths.capacity, section.shapes)
    return Batch(tokens, bin_cost, rule, Grid(topology), seed)


def _own_batch(lengths: LengthSet, seed: int) -> np.ndarray:
    stream = _stream(lengths, seed, 2 * lengths.documents)
    batch = next(batches(stream, stream.start, (DATA_SIZE * lengths.microbatches,)))
    return batch.pieces.tokens


def _stream(lengths: LengthSet, seed: int, documents: int) -> Stream:
    drawn = lengths.draw(seed, documents).astype(np.int32)
    blend = Blend((Documents(lengths.name, drawn, f"{lengths.name} {seed}"),), (1.0,))
    order = np.random.default_rng(seed).permutation(drawn.size)
    return Stream(blend, PieceRule(lengths.capacity), seed, lambda data_set, epoch: order)


def _ours(profile: Profile, evaluations: int, batch: Batch) -> Packed:
    room = batch.rule.room(batch.tokens)
    fallback = first_fit_bins(room, batch.rule.seq_length)
    kernels.fill_empty(kernels.longest_first(room), fallback, batch.grid.num_bins)
    placement = place(batch.tokens, batch.bin_cost, batch.rule, batch.grid, profile, fallback, evaluations)
    return Packed(batch.tokens, placement.bins, batch.grid)


def _figures(pack: Callable[[Batch], Packed], given: Sequence[Batch], bounds: Sequence[float], repeats: int) -> Figures:
    steps, times, fullest, ranks, below = [], [], [], [], False
    if repeats > 1:
        pack(given[0])  # compiled before it is timed
    for batch, bound_s in zip(given, bounds, strict=True):
        spent = []
        for _ in range(repeats):
            started = time.process_time()
            packed = pack(batch)
            spent.append(time.process_time() - started)
        times.append(1e3 * min(spent))
        grid = packed.grid
        seconds = micro_batch_s(packed.bins, batch.bin_cost.piece_s(packed.tokens), batch.bin_cost.empty_s, grid)
        step_s = judge_of(grid).step_s(seconds)
        steps.append(step_s / _ideal_s(batch))
        rank_s = seconds.sum(axis=(0, 2))
        ranks.append(rank_s.max() / rank_s.mean())
        fullest.append(np.bincount(packed.bins, packed.tokens).max() / batch.rule.seq_length)
        below |= bool(grid == batch.grid and fullest[-1] <= 1 and step_s < bound_s * (1 - ROUNDING))
    return Figures(tuple(steps), tuple(times), float(max(fullest)), float(np.mean(ranks)), below)


def _ideal_s(batch: Batch) -> float:
    """Seconds of a step in which no rank ever waits, in the bins given: padding that is computed counts as work."""
    empty_s = batch.grid.num_bins * float(batch.bin_cost.empty_s.sum())
    return (float(batch.cost.sum()) + empty_s) / (batch.data_size * batch.grid.topology.pipeline_size)


def _equal(topology: Topology) -> float:
    return 1 + (topology.pipeline_size - 1) / topology.virtual_size / topology.num_microbatches


# --- what there is to say


def _missed(section: Section, rows: dict[str, Row]) -> Iterator[str]:
    for name, target in section.targets:
        figures = rows[OURS].get(name)
        if figures is not None and round(figures.mean, 3) > target:
            yield f"{section.name}, {name}: {figures.mean:.4f}, target {target}"
    for name, figures in rows[OURS].items():
        if section.below_first_fit and figures.mean >= rows[FIRST_FIT][name].mean:
            yield f"{section.name}, {name}: {figures.mean:.4f}, first-fit {rows[FIRST_FIT][name].mean:.4f}"
        if float(np.mean(figures.ms)) > MOST_MS:
            yield f"{section.name}, {name}: {np.mean(figures.ms):.1f} ms a batch, target {MOST_MS:.0f}"
        if figures.over_capacity > 1:
            yield f"{section.name}, {name}: a bin at {figures.over_capacity:.3f} of its capacity"
    for row, by_set in rows.items():
        for name, figures in by_set.items():
            if figures.below_bound:
                yield f"{section.name}, {name}: {row} is below the lower bound"


def _print_rows(section: Section, rows: dict[str, Row], sets: Sequence[LengthSet], absent: Sequence[str]) -> None:
    names = [lengths.name for lengths in sets]
    headings = ["packer", *names, "ms a batch", "fullest bin / capacity", "DP max / mean"]
    cells = [[name, *map(str, row.values()), *_aside(tuple(row.values()))] for name, row in rows.items()]
    cells += [[name, "not installed", *[""] * (len(headings) - 2)] for name in absent]
    if section.targets:
        targets = dict(section.targets)
        cells.append(["target", *(f"{targets[name]:.3f}" for name in names), f"{MOST_MS:.0f}", "1.00", ""])
    print_table(headings, cells)


def _aside(figures: Sequence[Figures]) -> tuple[str, str, str]:
    """What packing took, how full its bins are and how unequal the ranks, of each set in turn."""
    if figures[0].over_capacity is None:
        return "", "", ""
    times = [float(np.mean(each.ms)) for each in figures]
    return (
        " / ".join(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in times),
        " / ".join(f"{each.over_capacity:.2f}" for each in figures),
        " / ".join(f"{each.ranks:.3f}" for each in figures),
    )


def _show_speed(sets: Sequence[LengthSet]) -> list[str]:
    """Print the documents a second that are cut into global batches; returns what is not reached."""
    rows, missed = [], []
    for lengths in sets:
        stream = _stream(lengths, 1, 1_000_000)
        size = DATA_SIZE * lengths.microbatches
        next(batches(stream, stream.start, (size,)))  # compiled before it is timed
        total, fills = stream.blend.data_sets[0].lengths.size, []
        cursor, started, cutting = (
            stream.start,
            time.process_time(),
            batches(stream, stream.start, itertools.repeat(size)),
        )
        while cursor.counts.documents < 0.9 * total:
            batch = next(cutting)
            cursor = batch.stop
            fills.append(batch.fill)
        rate = cursor.counts.documents / (time.process_time() - started)
        rows.append(
            (lengths.name, f"{size}", f"{rate / 1e6:.1f} million", f"{np.mean(fills):.4f}", f"{min(fills):.4f}")
        )
        if rate < LEAST_DOCUMENTS_PER_S:
            missed.append(f"{SPEED}, {lengths.name}: {rate:.0f} documents/s, target {LEAST_DOCUMENTS_PER_S:.0f}")
    print(f"**{SPEED}**\n")
    print_table(("set", "bins a batch", "documents/s", "mean fill", "least fill"), rows)
    print()
    return missed


if __name__ == "__main__":
    sys.exit(main())
