"""What waits for what in a step: the dependencies between the operations of one data-parallel rank's pipeline.

A rank has six streams, in each of which operations run in the order in which they were recorded: passes, four directions of
transfers, data parallelism's exchanges. Across them

- a pass waits for what it receives; what a pass receives is waited for from the end of the rank's pass of that direction before;
- what a pass sends waits for it; the first backward transfers wait for the last forward pass but one before the first backward
  pass;
- the first forward pass of a chunk waits for its parameters; gradients that are reduced while the pipeline runs wait for the last
  backward pass of their chunk;
- after the last pass the rest of the step runs in turn.

Our recorder notes one stream a rank, that which computes: there each operation waits for the one before it, and nothing of the
above holds but that a transfer's ends are matched by their passes. A step begins when the last rank has ended the one before:
what a rank does of it until then takes no time. Where transfers overlap computation, a send does not wait for its receiver. What
is transferred within combined passes is part of them, with the waiting, so that with these the ranks' passes do not wait for one
another.

Both ends of a transfer, and all ranks of a collective, start moving data when the last of them has started.

Source of this model: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_balance.diagnosis.trace import (
    BACKWARD,
    BEGIN,
    CLIP,
    COMBINED,
    EMBEDDING,
    FINISH,
    FORWARD,
    GATHER,
    LAYERNORM,
    OPTIMIZER,
    PASSES,
    PAUSE,
    SCATTER,
    SEPARATE,
    TRANSFERS,
    of_kinds,
)
from megatron_balance.errors import BalanceError
from megatron_balance.schedule.order import schedule_order
from megatron_balance.topology import Topology

SYNCHRONISED = (GATHER, SCATTER, SEPARATE, CLIP, BEGIN, FINISH)  # over all data-parallel ranks
# What follows the last pass; where two start at once, in this order.
TAIL = (PAUSE, LAYERNORM, EMBEDDING, SCATTER, SEPARATE, CLIP, OPTIMIZER, GATHER)

_ROUNDING_S = 1e-4  # by which what waits may seem to begin before what it waits for has ended


def is_exchange(name: str) -> bool:
    """Whether an operation moves data between ranks once all of them have started it."""
    return name.endswith(("-send", "-recv")) or name in SYNCHRONISED or name == EMBEDDING


@dataclass(frozen=True)
class Nodes:
    """The operations of a step; arrays of shape [nodes], names as in ``Cells``."""

    kinds: tuple[str, ...]
    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    order: np.ndarray

    def are(self, *names: str) -> np.ndarray:
        """Whether each operation is of one of these kinds, bool."""
        return of_kinds(self.kind, self.kinds, names)

    def of(self, name: str, stage: int) -> list[int]:
        """Nodes of a kind on a pipeline rank, in turn."""
        mine = np.flatnonzero(self.are(name) & (self.stage == stage))
        return [int(node) for node in mine[np.argsort(self.order[mine], kind="stable")]]


@dataclass(frozen=True)
class Group:
    """Operations that move data together, or a single one.

    Attributes:
        members: nodes.
        waits: for each member the nodes that end before it starts.
        transfers: whether the members wait for one another.
        all_lanes: whether they wait for those of all data-parallel ranks.
        sent: nodes without whose beginning nothing is moved, though the members do not hold them up.
    """

    members: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    transfers: bool
    all_lanes: bool
    sent: tuple[int, ...] = ()


Calls = list[list[tuple[int, ...]]]  # of each pipeline rank in turn, the operations of each


def calls_of(nodes: Nodes, stages: int, start_s: np.ndarray, end_s: np.ndarray) -> Calls:
    """Of each pipeline rank its operations in turn, those of one call together: transfers that begin and end at once.

    Args:
        nodes: the operations, each rank's from the end of the one before.
        stages: pipeline ranks.
        start_s, end_s: as recorded, shape [steps, nodes, lanes]. Those of the first cell give the turn. What begins and ends at
            once is one call if it does so in all cells: in one of them two calls may look alike, as clocks tick in microseconds.
    """
    moves = nodes.are(*TRANSFERS)
    ranks: Calls = []
    for stage in range(stages):
        mine = np.flatnonzero(nodes.stage == stage)
        turn = mine[np.lexsort((end_s[0, mine, 0], start_s[0, mine, 0]))]
        calls: list[tuple[int, ...]] = []
        for node in map(int, turn):
            before = calls[-1][0] if calls else node
            transfers = calls and moves[node] and moves[before]
            if transfers and all((marks_s[:, node] == marks_s[:, before]).all() for marks_s in (start_s, end_s)):
                calls[-1] += (node,)
            else:
                calls.append((node,))
        ranks.append(calls)
    return ranks


def groups_of(
    nodes: Nodes,
    topology: Topology,
    start_s: np.ndarray,
    end_s: np.ndarray,
    calls: Calls | None = None,
    sends_ahead: bool = False,
) -> tuple[Group, ...]:
    """All operations of a step, each after what it waits for.

    Args:
        nodes: the operations.
        topology: sizes of the pipeline.
        start_s, end_s: of each operation in one recorded cell, shape [nodes]. The ranks' passes are taken in this order; where
            that has a circle, as damaged clocks make it, in that of Megatron's schedule, but not with ``calls``.
        calls: as ``calls_of`` gives them, where each rank's operations were recorded in turn (``Job.in_turn``).
        sends_ahead: as in ``Job``.

    Raises:
        BalanceError: the operations wait for one another in a circle.
    """
    recorded = [_passes(nodes, stage, start_s) for stage in range(topology.pipeline_size)]
    groups = _Builder(nodes, topology, start_s, end_s, recorded, calls, sends_ahead).groups()
    if groups is None and calls is None:
        groups = _Builder(nodes, topology, start_s, end_s, _scheduled(nodes, topology)).groups()
    if groups is None:
        orders = "the recorded order" if calls is not None else "the recorded order and in that of Megatron's schedule"
        raise BalanceError(
            f"the operations wait for one another in a circle, in {orders}: "
            "the clocks or the micro-batch numbers of the trace are damaged"
        )
    return groups


def _passes(nodes: Nodes, stage: int, start_s: np.ndarray) -> list[int]:
    passes = [node for name in PASSES for node in nodes.of(name, stage)]
    return sorted(passes, key=lambda node: start_s[node])


def _scheduled(nodes: Nodes, topology: Topology) -> list[list[int]]:
    order = schedule_order(topology)
    found = {
        (
            int(nodes.stage[node]),
            nodes.kinds[nodes.kind[node]],
            int(nodes.chunk[node]),
            int(nodes.microbatch[node]),
        ): node
        for node in range(nodes.kind.size)
    }
    turns = []
    for stage in range(topology.pipeline_size):
        passes = zip(order.is_backward[stage], order.chunk[stage], order.microbatch[stage], strict=True)
        keys = ((stage, BACKWARD if back else FORWARD, int(chunk), int(which)) for back, chunk, which in passes)
        turns.append([found[key] for key in keys if key in found])
        if nodes.of(COMBINED, stage):
            raise BalanceError(
                "combined passes are not in the order in which they were recorded: the clocks are damaged"
            )
    return turns


def _behind(topology: Topology) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Chunk and micro-batch of the backward pass in each combined pass, by its pipeline rank and what its forward pass has."""
    order = schedule_order(topology)
    return {
        (int(rank), int(order.chunk[rank, at]), int(order.microbatch[rank, at])): (
            int(order.chunk[rank, at + 1]),
            int(order.microbatch[rank, at + 1]),
        )
        for rank, at in zip(*np.nonzero(order.combined), strict=True)
    }


class _Builder:
    """Collects what each operation waits for and whom it moves data with."""

    def __init__(
        self,
        nodes: Nodes,
        topology: Topology,
        start_s: np.ndarray,
        end_s: np.ndarray,
        passes: list[list[int]],
        calls: Calls | None = None,
        sends_ahead: bool = False,
    ) -> None:
        self.nodes, self.topology, self.passes = nodes, topology, passes
        self.start_s, self.end_s = start_s, end_s
        self.behind = _behind(topology) if COMBINED in nodes.kinds else {}
        self.waits: list[list[int]] = [[] for _ in range(nodes.kind.size)]
        self.partners: list[list[int]] = []
        self.sends_ahead, self.sent = sends_ahead, {}
        self.transfers: dict[tuple[str, int, int, int], int] = {}
        in_turn = calls is not None
        is_merged = in_turn and COMBINED in nodes.kinds
        for stage in range(topology.pipeline_size):
            if not is_merged:
                self._match_transfers(stage, in_turn)
            if not in_turn:
                self._chain(passes[stage])
                self._first_backward(stage)
                self._rest(stage, self._data_parallel(stage))
        if in_turn:
            self._take_turns(calls)
        if not is_merged:
            self._pair_transfers()
        self._meet()

    def _take_turns(self, calls: Calls) -> None:
        for of_rank in calls:
            for before, after in pairwise(of_rank):
                for node in after:
                    self.waits[node] += before

    def _chain(self, turn: list[int]) -> None:
        for before, after in pairwise(turn):
            self.waits[after].append(before)

    def _kind(self, node: int) -> str:
        return self.nodes.kinds[self.nodes.kind[node]]

    def _of_direction(self, stage: int, direction: str) -> list[int]:
        return [node for node in self.passes[stage] if self._kind(node) in (direction, COMBINED)]

    def _label(self, node: int, direction: str) -> tuple[int, int]:
        """Chunk and micro-batch of a pass in this direction."""
        own = int(self.nodes.chunk[node]), int(self.nodes.microbatch[node])
        if direction == BACKWARD and self._kind(node) == COMBINED:
            return self.behind.get((int(self.nodes.stage[node]), *own), own)
        return own

    def _global_stage(self, node: int, direction: str) -> int:
        return self._label(node, direction)[0] * self.topology.pipeline_size + int(self.nodes.stage[node])

    def _match_transfers(self, stage: int, in_turn: bool) -> None:
        """Tell which pass each transfer of a rank is for; what then waits for what, unless all operations run in turn."""
        last = self.topology.num_stages - 1
        for direction, first_stage, last_stage in ((FORWARD, 0, last), (BACKWARD, last, 0)):
            way = direction.split("-")[0]
            passes = self._of_direction(stage, direction)
            for end, without in (("recv", first_stage), ("send", last_stage)):
                turn = self.nodes.of(f"{way}-{end}", stage)
                if not in_turn:
                    self._chain(turn)
                labels = [self._label(node, direction) for node in passes]
                places = [chunk * self.topology.pipeline_size + stage for chunk, _ in labels]
                with_peer = [at for at, place in enumerate(places) if place != without]
                for transfer, at in self._match(turn, labels, with_peer, end == "recv"):
                    if not in_turn:
                        self._attach(transfer, passes, at, end == "recv")
                    if places[at] != without:
                        self.transfers[(way, end, places[at], labels[at][1])] = transfer

    def _match(
        self, turn: list[int], labels: list[tuple[int, int]], with_peer: list[int], receives: bool
    ) -> list[tuple[int, int]]:
        """Pairs of a transfer and the place of its pass: by the transfers' labels, or else one after the other.

        Recorders note transfers for all passes, for those that have a peer, or (receiving) for all but the first.
        """
        if all(self.nodes.microbatch[node] >= 0 and self.nodes.chunk[node] >= 0 for node in turn):
            place = {label: at for at, label in enumerate(labels)}
            own = [(int(self.nodes.chunk[node]), int(self.nodes.microbatch[node])) for node in turn]
            return [(node, place[label]) for node, label in zip(turn, own, strict=True) if label in place]
        if len(turn) == len(with_peer):
            return list(zip(turn, with_peer, strict=True))
        if len(turn) == len(labels):
            return [(node, at) for at, node in enumerate(turn)]
        if receives and len(turn) == len(labels) - 1:
            return [(node, at + 1) for at, node in enumerate(turn)]
        raise BalanceError(
            f"{len(turn)} transfers of one direction on pipeline rank {int(self.nodes.stage[turn[0]])} fit neither its "
            f"{len(labels)} passes nor the {len(with_peer)} that have a peer: rows are missing from the trace"
        )

    def _attach(self, transfer: int, passes: list[int], at: int, receives: bool) -> None:
        if not receives:
            self.waits[transfer].append(passes[at])
            return
        self.waits[passes[at]].append(transfer)
        if at > 0:
            self.waits[transfer].append(passes[at - 1])

    def _first_backward(self, stage: int) -> None:
        passes = self.passes[stage]
        first = next((at for at, node in enumerate(passes) if self._kind(node) != FORWARD), 0)
        before = first - (2 if self._kind(passes[first]) == BACKWARD else 1) if passes else -1
        if before < 0:
            return
        for end in ("recv", "send"):
            for transfer in self.nodes.of(f"backward-{end}", stage)[:1]:
                self.waits[transfer].append(passes[before])

    def _pair_transfers(self) -> None:
        """Pair what is sent with what is received; where neither is recorded, a pass waits for the pass before it."""
        topology = self.topology
        ends: dict[tuple[str, int, int], int] = {}
        for stage in range(topology.pipeline_size):
            for direction in (FORWARD, BACKWARD):
                for node in self._of_direction(stage, direction):
                    which = self._label(node, direction)[1]
                    ends[(direction.split("-")[0], self._global_stage(node, direction), which)] = node
        for (way, stage, microbatch), node in ends.items():
            source = stage + (-1 if way == "forward" else 1)
            sender = ends.get((way, source, microbatch))
            if sender is None:
                continue
            send = self.transfers.get((way, "send", source, microbatch))
            receive = self.transfers.get((way, "recv", stage, microbatch))
            if send is not None and receive is not None and self.sends_ahead:
                self.waits[receive] += self.waits[send]
                self.sent[receive] = send
            elif send is not None and receive is not None:
                self.partners.append([send, receive])
            elif receive is not None:
                self.waits[receive].append(sender)
            else:
                self.waits[node].append(sender)

    def _data_parallel(self, stage: int) -> list[int]:
        """Exchanges of parameters and gradients; returns those of gradients that run while the pipeline does."""
        last_pass_s = max((self.end_s[node] for node in self.passes[stage]), default=-np.inf)
        exchanges = [*self.nodes.of(GATHER, stage), *self.nodes.of(SCATTER, stage)]
        self._chain(sorted(exchanges, key=lambda node: self.start_s[node]))
        for gather in self._first_of_chunk(reversed(self.nodes.of(GATHER, stage))):
            chunk = self.nodes.chunk[gather]
            passes = [node for node in self._of_direction(stage, FORWARD) if chunk in (-1, self.nodes.chunk[node])]
            if passes and self.end_s[gather] <= self.start_s[passes[0]] + _ROUNDING_S:
                self.waits[passes[0]].append(gather)
        scatters = [node for node in self.nodes.of(SCATTER, stage) if self.start_s[node] < last_pass_s - _ROUNDING_S]
        for scatter in self._first_of_chunk(scatters):
            chunk = self.nodes.chunk[scatter]
            passes = self._of_direction(stage, BACKWARD)
            if chunk >= 0:
                passes = [node for node in passes if self._label(node, BACKWARD)[0] == chunk]
            else:
                passes = [node for node in passes if self.end_s[node] <= self.start_s[scatter] + _ROUNDING_S]
            if passes:
                self.waits[scatter].append(passes[-1])
        return scatters

    def _first_of_chunk(self, turn: Iterable[int]) -> list[int]:
        """The first of each chunk in ``turn``."""
        found: dict[int, int] = {}
        for node in turn:
            found.setdefault(int(self.nodes.chunk[node]), node)
        return list(found.values())

    def _rest(self, stage: int, early_scatters: list[int]) -> None:
        """What follows the last pass, in turn, and waits for the gradients that were exchanged before."""
        if not self.passes[stage]:
            return
        last = max(self.passes[stage], key=lambda node: self.end_s[node])
        gathers = self.nodes.of(GATHER, stage)
        early = {*early_scatters, *(node for node in gathers if self.start_s[node] < self.end_s[last] - _ROUNDING_S)}
        tail = [(place, node) for place, name in enumerate(TAIL) for node in self.nodes.of(name, stage)]
        tail = sorted(
            (pair for pair in tail if pair[1] not in early),
            key=lambda pair: (max(self.start_s[pair[1]], self.end_s[last]), pair[0]),
        )
        turn = [node for _, node in tail]
        self._chain([last, *turn])
        after = next((node for node in turn if self._kind(node) != PAUSE), None)
        if early_scatters and after is not None:
            self.waits[after].append(early_scatters[-1])

    def _meet(self) -> None:
        """Collectives over pipeline ranks."""
        for name in (EMBEDDING, CLIP, BEGIN, FINISH):
            mine = np.flatnonzero(self.nodes.are(name))
            for turn in np.unique(self.nodes.order[mine]):
                self.partners.append([int(node) for node in mine[self.nodes.order[mine] == turn]])

    def groups(self) -> tuple[Group, ...] | None:
        """All operations sorted topologically; None where they have a circle."""
        group_of = np.full(len(self.waits), -1)
        members: list[list[int]] = []
        for together in self.partners:
            group_of[together] = len(members)
            members.append(together)
        for node in range(len(self.waits)):
            if group_of[node] < 0:
                group_of[node] = len(members)
                members.append([node])
        before = [{int(group_of[wait]) for node in each for wait in self.waits[node]} for each in members]
        after: list[list[int]] = [[] for _ in members]
        for number, each in enumerate(before):
            for wait in each:
                after[wait].append(number)
        left = [len(each) for each in before]
        ready = [number for number, count in enumerate(left) if count == 0]
        for number in ready:
            for follower in after[number]:
                left[follower] -= 1
                if left[follower] == 0:
                    ready.append(follower)
        if len(ready) < len(members):
            return None
        return tuple(self._group(members[number]) for number in ready)

    def _group(self, members: list[int]) -> Group:
        name = self._kind(members[0])
        waits = tuple(tuple(dict.fromkeys(self.waits[node])) for node in members)
        sent = tuple(self.sent[node] for node in members if node in self.sent)
        return Group(tuple(members), waits, is_exchange(name), name in SYNCHRONISED, sent)
