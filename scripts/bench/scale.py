#!/usr/bin/env python3
"""What planning takes as a job grows: more GPUs, more documents, more data-parallel ranks. One core, no GPU.

Four tables:

  split      `megatron-balance plan` of Llama-3-70B for 64 to 16,384 GPUs; a process of its own each time, with its imports
  documents  a million to a billion documents: the order of an epoch made and opened, then the first batches of 16,384 GPUs;
             each a process of its own. "Peak" counts what is mapped of the files, which all processes of a machine share;
             "own" is what each process has for itself
  pack       `megatron-balance pack` on the same data
  ranks      a global batch planned for 4 to 1,024 data-parallel ranks: with as many micro-batches for each rank, then the
             same bins dealt to more ranks; and what is left of that inside a rank's step

Writes Megatron indices of log-normal lengths (median 1,024 tokens, sigma 1.4, at most 32,768): those of four million are drawn,
then repeated. What nobody reads of the files stays a hole: a billion documents take 4 GB, and their order 4 GB more.

    python scripts/bench/scale.py [--only TEXT] [--documents N ...] [--quick] [--markdown]
        [--picture FILE.png] [--results FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # run from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from tables import print_table  # noqa: E402

from megatron_balance.topology import Topology  # noqa: E402

if TYPE_CHECKING:  # importing the rest is a part of what is measured
    from megatron_balance.megatron.packed.planner import Planner
    from megatron_balance.megatron.packed.totals import Told
    from megatron_balance.packing.cost import BinCost
    from megatron_balance.packing.grid import Grid
    from megatron_balance.packing.profile import Profile
    from megatron_balance.packing.stream import Stream

MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 1024, 1.4, 32768
DRAWN = 2**22  # documents; more repeat them
RATIO = 49152.0  # a document of s tokens costs RATIO * s + s**2
CAPACITY = 8192
TENSOR, PIPELINE, MICROBATCHES = 8, 16, 32  # of the largest job, with 128 data-parallel ranks
LARGEST = Topology(PIPELINE, MICROBATCHES, tensor_size=TENSOR, data_size=128)
SPLIT, DOCUMENTS, PACK, RANKS = "split", "documents", "pack", "ranks"
LLAMA_3_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention"
    " --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm"
    " --position-embedding-type rope --vocab-size 128256 --seq-length 8192 --micro-batch-size 1 --bf16 --sequence-parallel"
    " --use-distributed-optimizer --balanced-pipeline-device H100"
)


Found = dict[str, list[dict[str, float]]]  # rows of each table


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        splits: pipeline, virtual and data-parallel sizes.
        documents: in the data.
        ranks: data-parallel ones.
        batches: planned for each figure, of which the median is taken.
    """

    splits: tuple[tuple[int, int, int], ...]
    documents: tuple[int, ...]
    ranks: tuple[int, ...]
    batches: int


FULL = Sizes(
    splits=(
        *((min(PIPELINE, world // TENSOR), 1, max(1, world // (TENSOR * PIPELINE))) for world in (64, 256, 1024, 4096)),
        *((pipeline, 1, 2048 // pipeline) for pipeline in (16, 32, 64)),
        *((PIPELINE, 4, data) for data in (8, 32, 128)),
    ),
    documents=(10**6, 10**7, 10**8, 10**9),
    ranks=(4, 16, 64, 128, 256, 512, 1024),
    batches=9,
)
QUICK = Sizes(splits=((8, 1, 1), (16, 1, 128)), documents=(30_000, 300_000), ranks=(4, 16, 64), batches=3)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](*options.child[1:])))
        return 0
    sizes = QUICK if options.quick else FULL
    if options.documents:
        sizes = replace(sizes, documents=tuple(options.documents))
    chosen = [name for name in (SPLIT, DOCUMENTS, PACK, RANKS) if options.only.lower() in name]
    if not chosen:
        print(f"no table has {options.only!r} in its name", file=sys.stderr)
        return 2
    kept = Path(options.results) if options.results else None
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        if not options.quick:
            _compile(chosen, Path(place))
        found = _measured(chosen, sizes, Path(place))
    for name, rows in found.items():
        if not options.markdown:
            print(f"**{name}**\n")
        _show(name, rows)
        print(flush=True)
    if kept is not None:
        found = _merged(json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}, found)
        kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.picture and found.keys() != {PACK}:
        _draw(options.picture, found)
    return 0


def _measured(chosen: Sequence[str], sizes: Sizes, place: Path) -> Found:
    found: Found = {}
    if SPLIT in chosen:
        found[SPLIT] = [_split(*each) for each in sizes.splits]
    if DOCUMENTS in chosen or PACK in chosen:
        data = [_data(count, sizes.batches, place, chosen) for count in sizes.documents]
        found |= {name: [each[name] for each in data] for name in (DOCUMENTS, PACK) if name in chosen}
    if RANKS in chosen:
        of_each = [(ranks, MICROBATCHES) for ranks in sizes.ranks]
        of_all = [(ranks, LARGEST.data_size * MICROBATCHES // ranks) for ranks in sizes.ranks]
        found[RANKS] = [_ranks(*each, sizes.batches) for each in of_each + of_all]
    return found


def _compile(chosen: Sequence[str], place: Path) -> None:
    """Have the kernels compiled and kept before anything is measured."""
    if SPLIT in chosen:
        _split(8, 1, 1)
    if DOCUMENTS in chosen or PACK in chosen:
        _data(QUICK.documents[0], 2, place, chosen)


def _merged(before: Found, now: Found) -> Found:
    """Tables of earlier runs, with the rows of this one for those that begin alike."""
    merged = {}
    for name in (name for name in COLUMNS if name in before or name in now):
        keys = ("gpus", "documents", "pipeline", "virtual", "microbatches")
        rows = [*before.get(name, []), *now.get(name, [])]
        merged[name] = list({tuple(row.get(key) for key in keys): row for row in rows}.values())
    return merged


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="tables that have TEXT in their name")
    parser.add_argument("--documents", type=int, nargs="+", metavar="N", help="in place of a million to a billion")
    parser.add_argument("--quick", action="store_true", help="small sizes, some seconds")
    parser.add_argument("--markdown", action="store_true", help="the tables alone, for the README")
    parser.add_argument("--picture", metavar="FILE.png", help="draw how it grows (needs matplotlib)")
    parser.add_argument(
        "--folder", help="where to write, and remove, the data (default: the system's temporary folder)"
    )
    parser.add_argument(
        "--results",
        metavar="FILE.json",
        help="keep the figures here, beside those of earlier runs, and draw all of them",
    )
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


# --- processes of their own


def _child(*arguments: str) -> dict[str, float]:
    """What a child says of itself, with the seconds and the memory of the whole process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = time.perf_counter()
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return {"process_s": time.perf_counter() - started, **json.loads(done.stdout)}


def _memory() -> dict[str, float]:
    """Peak megabytes of this process, and those that no file backs at the end."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1:] == ["kB"]}
    return {"peak_mb": kilobytes["VmHWM"] / 1e3, "own_mb": kilobytes["RssAnon"] / 1e3}


def _command(*words: str) -> dict[str, float]:
    """Run `megatron-balance` with these words; what its JSON says that is a number."""
    from megatron_balance.cli import main as run

    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as wrong:
        status = run([*words, "--json"])
    if status:
        raise SystemExit(wrong.getvalue())
    values = json.loads(said.getvalue())
    return {name: value for name, value in values.items() if isinstance(value, (int, float))} | _memory()


def _split(pipeline: int, virtual: int, data: int) -> dict[str, float]:
    sizes = (
        f"--tensor-model-parallel-size {TENSOR} --pipeline-model-parallel-size {pipeline}"
        f" --world-size {TENSOR * pipeline * data} --global-batch-size {max(MICROBATCHES, pipeline) * data}"
    )
    if virtual > 1:
        sizes += f" --num-virtual-stages-per-pipeline-rank {virtual}"
    planned = _child("command", "plan", *LLAMA_3_70B.split(), *sizes.split())
    return {
        "gpus": TENSOR * pipeline * data, "pipeline": pipeline, "virtual": virtual, "data": data,
        "microbatches": max(MICROBATCHES, pipeline), **planned,
    }  # fmt: skip


# --- documents


def _data(documents: int, batches: int, place: Path, chosen: Sequence[str]) -> dict[str, dict[str, float]]:
    prefix, cache = place / "data", place / "cache"
    _write_index(prefix, documents)
    found: dict[str, dict[str, float]] = {}
    made = _child("batches", str(prefix), str(cache), str(batches))
    if DOCUMENTS in chosen:
        opened = _child("batches", str(prefix), str(cache), str(batches))
        order_mb = sum(file.stat().st_size for file in cache.iterdir()) / 1e6
        found[DOCUMENTS] = {"documents": documents, "order_mb": order_mb, **opened}
        found[DOCUMENTS] |= {f"making_{name}": value for name, value in made.items()}
    if PACK in chosen:
        job = (
            f"--seq-length {CAPACITY} --global-batch-size {LARGEST.data_size * MICROBATCHES} --data-parallel-size"
            f" {LARGEST.data_size} --tensor-model-parallel-size {TENSOR} --pipeline-model-parallel-size {PIPELINE}"
        )
        words = [
            "pack",
            str(prefix),
            "--split",
            "1,0,0",
            *job.split(),
            "--data-cache-path",
            str(cache),
            "--batches",
            "2",
        ]
        found[PACK] = {"documents": documents, **_child("command", *words)}
    for file in (*place.glob("data.*"), *cache.iterdir()):
        file.unlink()
    return found


def _write_index(prefix: Path, documents: int) -> None:
    """An index whose lengths and last pointer are written; the other pointers, and all tokens, are holes."""
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, min(documents, DRAWN)), 16, MOST_TOKENS).astype("<i4")
    tokens = last = 0
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, documents, documents + 1))
        for first in range(0, documents, drawn.size):
            part = drawn[: documents - first]
            part.tofile(file)
            tokens, last = tokens + int(part.sum(dtype=np.int64)), int(part[-1])
        file.seek(8 * (documents - 1), os.SEEK_CUR)
        file.write(struct.pack("<q", 4 * (tokens - last)))
        file.truncate(file.tell() + 8 * (documents + 1))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(4 * tokens)


def _batches(prefix: str, cache: str, batches: str) -> dict[str, float]:
    """In a process of its own: what training does with its data until the first batches are planned."""
    started = time.perf_counter()
    from megatron_balance.packing.cost import VARIABLE, BinCost, SequenceCost
    from megatron_balance.packing.documents import Blend, read_documents
    from megatron_balance.packing.grid import Grid
    from megatron_balance.packing.index import epoch_order
    from megatron_balance.packing.pieces import PieceRule
    from megatron_balance.packing.profile import load_or_tune, tuning_grid, tuning_samples
    from megatron_balance.packing.stream import Stream

    imported = time.perf_counter()
    documents, rule, folder = read_documents(prefix), PieceRule(CAPACITY), Path(cache)
    read = time.perf_counter()
    order = epoch_order(documents, 1234, 0, 0, folder)
    ordered = time.perf_counter()
    stream = Stream(Blend.of([documents]), rule, 1234, lambda data_set, epoch: order)
    cost, grid = BinCost(SequenceCost.of_ratio(RATIO), CAPACITY, VARIABLE), Grid(LARGEST)
    tuned = tuning_grid(grid)
    samples = tuning_samples(stream, tuned.num_bins)
    sampled = time.perf_counter()
    profile = load_or_tune(folder, samples, cost, rule, tuned)
    profiled = time.perf_counter()
    times = list(itertools.islice(_timed(stream, cost, grid, profile), int(batches)))
    return {
        "import_s": imported - started, "read_s": read - imported, "order_s": ordered - read,
        "sample_s": sampled - ordered, "profile_s": profiled - sampled,
        "step_ms": float(np.median(times[1:])), **_memory(),
    }  # fmt: skip


def _timed(stream: Stream, cost: BinCost, grid: Grid, profile: Profile) -> Iterator[float]:
    """Milliseconds of cutting and placing one global batch after another."""
    from megatron_balance.packing.cut import cut
    from megatron_balance.packing.placement import place

    cursor = stream.start
    while True:
        started = time.perf_counter()
        batch = cut(stream, cursor, grid.num_bins)
        place(batch.pieces.tokens, cost, stream.rule, grid, profile, batch.bins)
        yield 1e3 * (time.perf_counter() - started)
        cursor = batch.stop


CHILDREN: dict[str, Callable[..., dict[str, float]]] = {"command": _command, "batches": _batches}


# --- ranks


def _ranks(ranks: int, microbatches: int, batches: int) -> dict[str, float]:
    """A job's planner, as each of its processes has it, until a rank has what it runs in a step."""
    from megatron_balance.megatron.packed.planner import Planner
    from megatron_balance.megatron.packed.totals import Told, totals_of
    from megatron_balance.packing.cost import VARIABLE, BinCost, SequenceCost
    from megatron_balance.packing.cut import GlobalBatch
    from megatron_balance.packing.documents import Blend, Documents
    from megatron_balance.packing.grid import Grid
    from megatron_balance.packing.pieces import PieceRule
    from megatron_balance.packing.placement import Placement, place
    from megatron_balance.packing.profile import Profile
    from megatron_balance.packing.stream import Stream

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, 10**6), 16, MOST_TOKENS).astype(np.int32)
    rule, cost = PieceRule(CAPACITY), BinCost(SequenceCost.of_ratio(RATIO), CAPACITY, VARIABLE)
    order, profile = rng.permutation(lengths.size), Profile((0.3, 1.5, 2.5, 2.5, 1.5, 0.3), alpha=5.0)
    stream = Stream(Blend.of([Documents.of("drawn", lengths)]), rule, 0, lambda data_set, epoch: order)
    grid = Grid(replace(LARGEST, data_size=ranks, num_microbatches=microbatches))
    placements: list[Placement] = []

    def placed(batch: GlobalBatch) -> Placement:
        placements.append(place(batch.pieces.tokens, cost, rule, grid, profile, batch.bins))
        return placements[-1]

    planner = Planner(stream, (0, stream.start), lambda item: grid.num_bins, placed)
    totals, told = totals_of(planner, 1, with_cursor=True), Told()
    rows = []
    for number in range(batches + 1):  # the first compiles
        rows.append(_step_parts(planner, number * grid.num_bins, grid, totals, told))
    cut_s, place_s, ready_s, own_s, logged_s, pieces = np.median(rows[1:], axis=0).tolist()
    over_ideal = np.mean([each.step_s / each.ideal_s for each in placements[1:]])
    return {
        "ranks": ranks, "gpus": ranks * TENSOR * PIPELINE, "microbatches": microbatches, "bins": grid.num_bins,
        "pieces": pieces, "cut_ms": 1e3 * cut_s, "place_ms": 1e3 * (place_s + ready_s), "own_us": 1e6 * own_s,
        "logged_us": 1e6 * logged_s,
        "piece_us": 1e6 * (cut_s + place_s + ready_s) / pieces, "over_ideal": float(over_ideal),
    }  # fmt: skip


def _step_parts(
    planner: Planner, first: int, grid: Grid, totals: Callable[[int], dict[str, np.ndarray]], told: Told
) -> tuple[float, ...]:
    """Of a step that begins with bin ``first``: seconds of cutting, placing, and making it ready, of what a rank takes of it a
    micro-batch, and of hearing what its items say of it; its pieces.
    """
    ranks, microbatches = grid.topology.data_size, grid.topology.num_microbatches
    started = time.perf_counter()
    window = planner.window(first)
    cut = time.perf_counter()
    _ = window.placement
    planned = time.perf_counter()
    window.pieces(window.first)
    said = {name: value[None] for name, value in totals(window.first).items()}
    ready = time.perf_counter()
    for k in range(microbatches):  # those of rank 1
        planner.pieces(window.first + k * ranks + 1)
    own = time.perf_counter()
    for _ in range(microbatches):
        told.note(said)
    _ = told.batch
    logged = time.perf_counter()
    own_s = (own - ready) / microbatches
    return cut - started, planned - cut, ready - planned, own_s, logged - own, len(window.batch.pieces)


# --- what there is to say

COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    SPLIT: (
        ("GPUs", "gpus", ",.0f"), ("pipeline ranks", "pipeline", ".0f"), ("virtual stages", "virtual", ".0f"),
        ("data-parallel ranks", "data", ".0f"), ("micro-batches", "microbatches", ".0f"), ("s", "process_s", ".2f"),
        ("peak memory, MB", "peak_mb", ",.0f"), ("simulated step, s", "iteration_s", ".2f"),
    ),
    DOCUMENTS: (
        ("documents", "documents", ",.0f"), ("reading lengths, s", "read_s", ".2f"),
        ("making the order, s", "making_order_s", ".2f"), ("opening it, s", "order_s", ".2f"),
        ("tuning the profile once, s", "making_profile_s", ".2f"), ("first process in all, s", "making_process_s", ".1f"),
        ("its peak memory, MB", "making_peak_mb", ",.0f"), ("each other in all, s", "process_s", ".1f"),
        ("peak, MB", "peak_mb", ",.0f"), ("own, MB", "own_mb", ",.0f"), ("file, MB", "order_mb", ",.0f"),
        ("a step, ms", "step_ms", ".1f"),
    ),
    PACK: (
        ("documents", "documents", ",.0f"), ("s", "process_s", ".1f"), ("peak memory, MB", "peak_mb", ",.0f"),
        ("own, MB", "own_mb", ",.0f"),
    ),
    RANKS: (
        ("data-parallel ranks", "ranks", ",.0f"), ("GPUs", "gpus", ",.0f"), ("micro-batches", "microbatches", ",.0f"),
        ("bins", "bins", ",.0f"), ("pieces", "pieces", ",.0f"), ("cut, ms", "cut_ms", ".1f"),
        ("placement, ms", "place_ms", ".1f"), ("both a piece, us", "piece_us", ".2f"),
        ("in the step, a micro-batch, us", "own_us", ".1f"), ("for the log, a step, us", "logged_us", ".1f"),
        ("step over ideal", "over_ideal", ".3f"),
    ),
}  # fmt: skip


def _show(name: str, rows: Sequence[dict[str, float]]) -> None:
    columns = COLUMNS[name]
    cells = [[format(row[key], form) for _, key, form in columns] for row in rows]
    print_table([heading for heading, _, _ in columns], cells)


def _draw(path: str, found: Found) -> None:
    """A panel for each table, logarithmic both ways."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [name for name in found if name != PACK]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for axis, name in zip(axes[0], panels, strict=True):
        for label, rows, across, up in _curves(name, found):
            axis.loglog([row[across] for row in rows], [row[up] for row in rows], "o-", label=label)
        if name != DOCUMENTS:  # which are powers of ten
            places = sorted({row[across] for row in found[name]})
            axis.set_xticks(places, [f"{place:,}" for place in places], rotation=45, ha="right", fontsize=8)
            axis.minorticks_off()
        if name == SPLIT:
            axis.set_ylim(0.1, 100)  # level is what there is to see
        axis.set_xlabel({SPLIT: "GPUs", DOCUMENTS: "documents", RANKS: "data-parallel ranks"}[name])
        axis.set_ylabel("ms a global batch" if name == RANKS else "s")
        axis.set_title({SPLIT: "a split planned", DOCUMENTS: "start with the data", RANKS: "a batch planned"}[name])
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(name: str, found: Found) -> Iterator[tuple[str, list[dict[str, float]], str, str]]:
    """Label, rows, and the keys of both axes."""
    rows = found[name]
    if name == SPLIT:
        for virtual in sorted({row["virtual"] for row in rows}):
            chosen = [row for row in rows if row["virtual"] == virtual and row["pipeline"] <= PIPELINE]
            yield f"{virtual} virtual stages" if virtual > 1 else "1F1B", chosen, "gpus", "process_s"
    elif name == DOCUMENTS:
        yield "making the order", rows, "documents", "making_order_s"
        yield "reading lengths", rows, "documents", "read_s"
        yield "opening the order", rows, "documents", "order_s"
        yield "planning a step", [{**row, "step_s": row["step_ms"] / 1e3} for row in rows], "documents", "step_s"
    else:
        each = list({row["ranks"]: row for row in rows if row["microbatches"] == MICROBATCHES}.values())
        same = list({row["ranks"]: row for row in rows if row["bins"] == LARGEST.data_size * MICROBATCHES}.values())
        total = [[{**row, "ms": row["cut_ms"] + row["place_ms"]} for row in chosen] for chosen in (each, same)]
        yield f"{MICROBATCHES} micro-batches a rank", total[0], "ranks", "ms"
        yield (
            f"{LARGEST.data_size * MICROBATCHES:,} bins",
            sorted(total[1], key=lambda row: row["ranks"]),
            "ranks",
            "ms",
        )
        inside = [{**row, "ms": row["own_us"] / 1e3} for row in each]
        yield "in a rank's step, a micro-batch", inside, "ranks", "ms"


if __name__ == "__main__":
    sys.exit(main())
