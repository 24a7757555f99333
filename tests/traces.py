"""Traces for tests: those that are published, others made by the simulator, and what is injected into either."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_balance.diagnosis.reading import read_trace
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD, Job, Sequences, Trace
from megatron_balance.diagnosis.trace_files import METADATA_KEY
from megatron_balance.schedule.order import Order
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

KINDS = (
    FORWARD,
    BACKWARD,
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "params-all-gather",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "optimizer",
    "gc",
)
GATHER_S, SCATTER_S, CLIP_S, OPTIMIZER_S = 0.02, 0.05, 0.001, 0.03  # of made traces


def public_folder() -> Path:
    """Where the published traces lie; skips the test where they are not there."""
    import pytest

    pytest.importorskip("pyarrow", reason="traces are read with pyarrow, of the extra 'trace'")
    data = os.environ.get("MEGATRON_BALANCE_DATA") or Path(__file__).parents[2] / "shared" / "data"
    folder = Path(data) / "straggler-traces"
    if not folder.is_dir():
        pytest.skip(f"the public traces are not in {folder} (MEGATRON_BALANCE_DATA names the folder that holds them)")
    return folder


def public_trace(name: str) -> Trace:
    """The published trace ``ST`` (stage imbalance) or ``SE`` (sequence lengths)."""
    folder = public_folder()
    return read_trace(folder / f"trace-{name}.parquet", folder / f"meta-{name}.yaml")


# --- made by the simulator


def made_trace(
    topology: Topology,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    sequences: Sequences | None = None,
    labelled: bool = False,
) -> Trace:
    """A trace whose passes last as given and whose transfers take no time.

    Args:
        topology: sizes; the trace has ``data_size`` replicas.
        forward_s, backward_s: seconds of each pass, shape [steps, DP, stages, M] or what broadcasts to [1 or more, ...].
        sequences: what the micro-batches hold.
        labelled: transfers tell chunk and micro-batch of their pass, which those of the published traces do not.
    """
    shape = (topology.data_size, topology.num_stages, topology.num_microbatches)
    steps = max(np.shape(forward_s)[0] if np.ndim(forward_s) == 4 else 1, 1)
    forward_s, backward_s = (np.broadcast_to(seconds, (steps, *shape)) for seconds in (forward_s, backward_s))
    simulator = Simulator(topology)
    order, hops = simulator.order, _Hops(topology, simulator.order)
    starts, ends = np.empty((2, steps, topology.data_size, order.chunk.size))
    for step in range(steps):
        for lane in range(topology.data_size):
            timeline = simulator.timeline(forward_s[step, lane], backward_s[step, lane])
            starts[step, lane], ends[step, lane] = timeline.start_s.ravel(), timeline.end_s.ravel()
    starts, ends = starts + GATHER_S, ends + GATHER_S
    parts = [_passes(topology, order, starts, ends), *hops.rows(starts, ends, labelled), *_once(topology, ends)]
    columns = [np.concatenate([part[number].ravel() for part in parts]) for number in range(8)]
    kind, step, dp_rank, pp_rank, chunk, microbatch, start_s, end_s = columns
    return Trace(
        Job("made", topology, topology.pipeline_size * topology.data_size * topology.tensor_size),
        kind=kind.astype(np.int16),
        kinds=KINDS,
        step=step.astype(np.int64),
        dp_rank=dp_rank.astype(np.int32),
        pp_rank=pp_rank.astype(np.int32),
        chunk=chunk.astype(np.int16),
        microbatch=microbatch.astype(np.int32),
        start_s=start_s,
        end_s=end_s,
        sequences=sequences,
    )


def made_step_s(topology: Topology, forward_s: np.ndarray, backward_s: np.ndarray) -> np.ndarray:
    """Seconds of each step of ``made_trace`` by the simulator alone; arguments of shape [steps, DP, stages, M]."""
    simulator = Simulator(topology)
    lanes = [
        [simulator.timeline(f, b).end_s[:, -1] for f, b in zip(*step, strict=True)]
        for step in zip(forward_s, backward_s, strict=True)
    ]
    of_rank_s = np.array(lanes).max(axis=1)  # [steps, PP]: the last replica of each pipeline rank
    return GATHER_S + of_rank_s.max(axis=1) + SCATTER_S + CLIP_S + OPTIMIZER_S


def _part(kind: str, shape: tuple[int, int, int], rank, chunk, microbatch, start_s, end_s) -> tuple[np.ndarray, ...]:
    """Eight columns of shape [steps, DP, operations]."""
    steps, lanes, _ = shape
    values = (
        KINDS.index(kind),
        np.arange(steps)[:, None, None],
        np.arange(lanes)[:, None],
        rank,
        chunk,
        microbatch,
        start_s,
        end_s,
    )
    return tuple(np.broadcast_to(value, shape) for value in values)


def _passes(topology: Topology, order: Order, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, ...]:
    rank = np.repeat(np.arange(topology.pipeline_size), order.chunk.shape[1])
    part = _part(FORWARD, starts.shape, rank, order.chunk.ravel(), order.microbatch.ravel(), starts, ends)
    kind = np.broadcast_to(order.is_backward.ravel().astype(int), starts.shape)
    return kind, *part[1:]


class _Hops:
    """Which pass sends to which."""

    def __init__(self, topology: Topology, order: Order) -> None:
        ranks, each = order.chunk.shape
        slots = np.arange(order.chunk.size)
        self.order = order
        self.rank = slots // each
        self.is_backward = order.is_backward.ravel()
        stage = order.chunk.ravel() * ranks + self.rank
        last = topology.num_stages - 1
        found = {
            (bool(back), int(at), int(which)): slot
            for slot, back, at, which in zip(slots, self.is_backward, stage, order.microbatch.ravel(), strict=True)
        }
        way = np.where(self.is_backward, 1, -1)
        self.receiver = np.flatnonzero(stage != np.where(self.is_backward, last, 0))
        self.sender = np.array(
            [
                found[bool(self.is_backward[slot]), int(stage[slot] + way[slot]), int(order.microbatch.ravel()[slot])]
                for slot in self.receiver
            ],
            dtype=int,
        )
        self.posted = np.array([self._before(slot, each) for slot in self.receiver], dtype=int)

    def _before(self, slot: int, each: int) -> int:
        """The pass at whose end a rank waits for what pass ``slot`` needs: its last of this direction, -1 for none."""
        first = slot // each * each
        same = np.flatnonzero(self.is_backward[first:slot] == self.is_backward[slot])
        if same.size:
            return int(first + same[-1])
        return int(slot - 2) if self.is_backward[slot] and slot - first >= 2 else -1

    def rows(self, starts: np.ndarray, ends: np.ndarray, labelled: bool) -> list[tuple[np.ndarray, ...]]:
        if not self.receiver.size:
            return []
        padded = np.concatenate([ends, np.zeros((*ends.shape[:-1], 1))], axis=-1)
        posted_s, sent_s = padded[..., self.posted], ends[..., self.sender]
        done_s = np.maximum(posted_s, sent_s)
        rows = []
        for back in (False, True):
            mine = self.is_backward[self.receiver] == back
            shape = (*starts.shape[:2], int(mine.sum()))
            way = "backward" if back else "forward"
            for end, slots, begun_s in (("recv", self.receiver, posted_s), ("send", self.sender, sent_s)):
                slots = slots[mine]
                labels = (
                    (self.order.chunk.ravel()[slots], self.order.microbatch.ravel()[slots]) if labelled else (-1, -1)
                )
                times = begun_s[..., mine], done_s[..., mine]
                rows.append(_part(f"{way}-{end}", shape, self.rank[slots], *labels, *times))
        return rows


def _once(topology: Topology, ends: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """All-gather, reduce-scatter, clipping and optimizer of each pipeline rank."""
    steps, lanes, _ = ends.shape
    ranks = np.arange(topology.pipeline_size)
    shape = (steps, lanes, topology.pipeline_size)
    last_s = ends.reshape(steps, lanes, topology.pipeline_size, -1).max(axis=-1)
    scattered_s = np.broadcast_to(last_s.max(axis=1, keepdims=True) + SCATTER_S, shape)
    clipped_s = np.broadcast_to(scattered_s.max(axis=(1, 2), keepdims=True) + CLIP_S, shape)
    rows = (
        ("params-all-gather", 0.0, GATHER_S),
        ("grads-reduce-scatter", last_s, scattered_s),
        ("optimizer-clip-main-grad", scattered_s, clipped_s),
        ("optimizer", clipped_s, clipped_s + OPTIMIZER_S),
    )
    return [_part(kind, shape, ranks, -1, -1, start_s, end_s) for kind, start_s, end_s in rows]


# --- injected


def replayed(trace: Trace, replay: Replay, seconds: np.ndarray) -> Trace:
    """The trace with these durations [steps, nodes, lanes]; what waits, waits as the dependencies say."""
    moments, nodes = replay.moments(seconds), replay.nodes
    shape = moments.start_s.shape

    def column(values: np.ndarray, axis: int) -> np.ndarray:
        return np.broadcast_to(np.expand_dims(values, tuple({0, 1, 2} - {axis})), shape).ravel()

    return replace(
        trace,
        kind=column(nodes.kind.astype(np.int16), 1),
        step=column(replay.steps, 0),
        dp_rank=column(replay.lanes.astype(np.int32), 2),
        pp_rank=column(nodes.stage.astype(np.int32), 1),
        chunk=column(nodes.chunk.astype(np.int16), 1),
        microbatch=column(nodes.microbatch.astype(np.int32), 1),
        start_s=moments.start_s.ravel(),
        end_s=moments.end_s.ravel(),
    )


def levelled(trace: Trace, noise: float = 0.0, seed: int = 0) -> Trace:
    """The trace with every duration at its ideal, up to random noise of this relative size on passes."""
    replay = Replay(trace)
    seconds = np.broadcast_to(replay.ideal_s[:, None], replay.actual_s.shape).copy()
    passes = is_kind(replay, FORWARD) | is_kind(replay, BACKWARD)
    random = np.random.default_rng(seed)
    seconds[:, passes] *= 1.0 + noise * random.standard_normal(seconds[:, passes].shape)
    return replayed(trace, replay, seconds)


def slowed(trace: Trace, dp_rank: int, pp_rank: int, factor: float) -> Trace:
    """The trace with one worker's passes ``factor`` times as long."""
    replay = Replay(trace)
    seconds = replay.actual_s.copy()
    mine = (is_kind(replay, FORWARD) | is_kind(replay, BACKWARD)) & (replay.nodes.stage == pp_rank)
    seconds[:, mine, int(np.searchsorted(replay.lanes, dp_rank))] *= factor
    return replayed(trace, replay, seconds)


def paused(trace: Trace, pause_s: float, chance: float, seed: int = 0, recorded: bool = False) -> Trace:
    """The trace with pauses in random forward passes, none in backward passes.

    Args:
        trace: into which they are put.
        pause_s: seconds of a pause.
        chance: of each forward pass to have one.
        seed: of the choice.
        recorded: add a row ``gc`` for each, within its pass, as our recorder does; the published traces have none.
    """
    replay = Replay(trace)
    seconds = replay.actual_s.copy()
    forwards = np.flatnonzero(is_kind(replay, FORWARD))
    hit = np.random.default_rng(seed).random((seconds.shape[0], forwards.size, seconds.shape[2])) < chance
    seconds[:, forwards] += pause_s * hit
    paused = replayed(trace, replay, seconds)
    if not recorded:
        return paused
    within = np.zeros(seconds.shape, dtype=bool)
    within[:, forwards] = hit
    rows = np.flatnonzero(within.ravel())
    kinds = paused.kinds if "gc" in paused.kinds else (*paused.kinds, "gc")
    gc = np.full(rows.size, kinds.index("gc"), dtype=np.int16)
    none = np.full(rows.size, -1)
    add = np.concatenate
    return replace(
        paused,
        kinds=kinds,
        kind=add([paused.kind, gc]),
        step=add([paused.step, paused.step[rows]]),
        dp_rank=add([paused.dp_rank, paused.dp_rank[rows]]),
        pp_rank=add([paused.pp_rank, paused.pp_rank[rows]]),
        chunk=add([paused.chunk, none.astype(np.int16)]),
        microbatch=add([paused.microbatch, none.astype(np.int32)]),
        start_s=add([paused.start_s, paused.start_s[rows]]),
        end_s=add([paused.end_s, paused.start_s[rows] + pause_s]),
    )


def is_kind(replay: Replay, name: str) -> np.ndarray:
    """Whether each node is of this kind, bool [nodes]."""
    if name not in replay.nodes.kinds:
        return np.zeros(replay.nodes.kind.size, dtype=bool)
    return replay.nodes.kind == replay.nodes.kinds.index(name)


# --- as our recorder writes it

_OTHER_END = {"forward-send": "forward-recv", "backward-recv": "backward-send"}


def turns(pass_s: np.ndarray, move_s: float = 0.25, rest_s: tuple[float, float, float] = (0.5, 1.0, 0.125)) -> Trace:
    """Steps of two pipeline ranks that do one thing after the other, as gloo and Megatron's 1F1B without overlap have it.

    Args:
        pass_s: seconds of the passes, [steps, 2 ranks, 2 ways, M].
        move_s: that a call's transfers take once both ranks have come.
        rest_s: of what is before the first operation, and of clipping and of what follows it, once both have come.
    """
    steps, _, _, count = pass_s.shape
    calls = [["forward-send"], *[["forward-send", "backward-recv"]] * (count - 1), ["backward-recv"]]
    rows: list[tuple] = []
    for step in range(steps):
        free = [100.0 * step + 1.0, 100.0 * step + 1.0]

        def alone(kind: str, rank: int, seconds: float, which: int = -1, step=step, free=free) -> None:
            rows.append((kind, step, rank, which, free[rank], free[rank] + seconds))
            free[rank] += seconds

        def together(of_rank: tuple[list[str], list[str]], seconds: float, step=step, free=free) -> None:
            end_s = max(free) + seconds
            rows.extend((kind, step, rank, -1, free[rank], end_s) for rank in range(2) for kind in of_rank[rank])
            free[:] = [end_s, end_s]

        for rank in range(2):
            alone("step-begin", rank, rest_s[0])
        alone(FORWARD, 0, pass_s[step, 0, 0, 0], 0)
        for which, call in enumerate(calls):
            together((call, [_OTHER_END[name] for name in call]), move_s)
            if which > 0:
                alone(BACKWARD, 0, pass_s[step, 0, 1, which - 1], which - 1)
            if which < count - 1:
                alone(FORWARD, 0, pass_s[step, 0, 0, which + 1], which + 1)
            if which < count:
                alone(FORWARD, 1, pass_s[step, 1, 0, which], which)
                alone(BACKWARD, 1, pass_s[step, 1, 1, which], which)
        together((["optimizer-clip-main-grad"], ["optimizer-clip-main-grad"]), rest_s[1])
        together((["step-end"], ["step-end"]), rest_s[2])
    names, step, rank, which, start_s, end_s = (np.array(column) for column in zip(*rows, strict=True))
    kinds = tuple(dict.fromkeys(names.tolist()))
    kind = np.array([kinds.index(name) for name in names])
    chunk = np.where(which >= 0, 0, -1)
    job = Job("made", Topology(2, count), 2, layers=(2, 2), in_turn=True)
    return Trace(job, kind, kinds, step, np.zeros_like(rank), rank, chunk, which, start_s, end_s)


# --- written


def table_of(trace: Trace, rows: np.ndarray | slice = slice(None), described: bool = True):
    """The trace's rows as the pyarrow table that its file would hold; with the job's sizes where ``described``."""
    import pyarrow

    names = pyarrow.DictionaryArray.from_arrays(trace.kind[rows].astype(np.int32), list(trace.kinds))
    columns: dict[str, object] = {
        "dp_rank": trace.dp_rank[rows],
        "stage": trace.pp_rank[rows],
        "step": trace.step[rows],
        "optype": names,
        "start_ts": trace.start_s[rows],
        "duration": (trace.end_s - trace.start_s)[rows],
        "mc": trace.chunk[rows],
        "mb_id": trace.microbatch[rows],
    }
    if trace.sequences is not None:
        columns |= _sequences(trace, rows)
    job = {"name": trace.job.name, "world_size": trace.job.world_size, "topology": asdict(trace.job.topology)}
    job |= {name: getattr(trace.job, name) for name in ("in_turn", "sends_ahead", "shapes")}
    if trace.job.layers is not None:
        chunks = np.reshape(trace.job.layers, (-1, trace.job.topology.pipeline_size)).T.tolist()
        job["stages"] = [[{"layers": [*range(layers)]} for layers in of_rank] for of_rank in chunks]
    metadata = {METADATA_KEY: json.dumps(job).encode()} if described else None
    return pyarrow.table(columns, metadata=metadata)


def _sequences(trace: Trace, rows: np.ndarray | slice) -> dict[str, object]:
    """What the micro-batches hold, in the rows of forward passes."""
    import pyarrow

    place = np.searchsorted(trace.steps, trace.step[rows]), trace.microbatch[rows], trace.dp_rank[rows]
    others = trace.kind[rows] != trace.kinds.index(FORWARD)
    return {
        field.name: pyarrow.array(getattr(trace.sequences, field.name)[place], mask=others)
        for field in fields(trace.sequences)
    }


def write_trace(trace: Trace, file: Path, described: bool = True) -> Path:
    """One parquet file of the whole job."""
    from pyarrow import parquet

    parquet.write_table(table_of(trace, described=described), file)
    return file


def write_ranks(trace: Trace, folder: Path) -> Path:
    """One parquet file a rank, as the recorder writes them."""
    from pyarrow import parquet

    worker = trace.pp_rank.astype(np.int64) * trace.job.topology.data_size + trace.dp_rank
    turn = np.argsort(worker, kind="stable")
    bounds = np.flatnonzero(np.r_[True, np.diff(worker[turn]) > 0, True])
    for first, last in pairwise(bounds):
        rows = turn[first:last]
        parquet.write_table(table_of(trace, rows), folder / f"rank-{worker[rows[0]]:05d}.parquet")
    return folder
