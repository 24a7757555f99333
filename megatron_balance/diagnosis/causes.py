"""Which causes slow a job down, and for how much of its slowdown each of them stands.

The durations of a trace are ideal ones plus a part for each cause plus a rest. A *what-if* replays the steps with the parts of
some causes only. As causes hide one another (while the last stage is slow, long sequences elsewhere cost nothing), none has a
share by itself; the Shapley value is the fair one: what a cause adds to the step, averaged over all orders in which causes can
come together. Shares add up to the slowdown but for what is no cause's: noise, and the optimizer.

Source of the what-ifs: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25); the Shapley value
is that of L. S. Shapley, "A Value for n-Person Games" (1953).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import factorial

import numpy as np

from megatron_balance.diagnosis.replay import COMMUNICATION as EXCHANGES
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import (
    CAUSES,
    COMMUNICATION,
    GARBAGE,
    HEALTHY,
    SEQUENCE_LENGTHS,
    STAGE_SPLIT,
    UNNAMED,
    WORKER,
)
from megatron_balance.diagnosis.signals import COUNTS, Signals

STRAGGLES = 1.1  # slowdown above which the study says that a job straggles
_MOST = 0.5  # share of a slowdown


@dataclass(frozen=True, eq=False)
class Causes:
    """The parts of a trace's durations, by cause.

    Attributes:
        replay: of the trace.
        signals: its passes taken apart; None where they could not be.
    """

    replay: Replay
    signals: Signals | None

    def extra_s(self, cause: str) -> np.ndarray:
        """Seconds that a cause adds to each operation, [steps, nodes, lanes] or what broadcasts to it.

        A pause or a slow worker adds; stages, lengths and communication add to some and take from others.
        """
        replay, signals = self.replay, self.signals
        if cause == COMMUNICATION:
            return np.where(replay.nodes.are(*EXCHANGES)[:, None], replay.actual_s - replay.ideal_s[:, None], 0.0)
        extra = np.zeros_like(replay.actual_s)
        if cause == GARBAGE:
            extra = replay.paused_s.copy()
        if signals is None:
            return extra
        extra[:, signals.nodes] = {
            STAGE_SPLIT: lambda: (signals.stage_s - signals.stage_s.mean(axis=1, keepdims=True))[:, :, None, None],
            SEQUENCE_LENGTHS: lambda: signals.length_s,
            WORKER: lambda: signals.worker_s[:, :, None],
            GARBAGE: lambda: signals.pause_s,
        }[cause]()
        return extra

    @cached_property
    def present(self) -> tuple[str, ...]:
        """Causes that add anything."""
        return tuple(cause for cause in CAUSES if self.extra_s(cause).any())

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of T - T_ideal of each of ``CAUSES``; 0 for all where nothing is lost."""
        names = self.present
        worth_s = self._coalitions_s(names)
        lost_s = self.actual_s - self.ideal_s
        if not names or lost_s <= 1e-9 * self.actual_s:
            return dict.fromkeys(CAUSES, 0.0)
        shares = dict.fromkeys(CAUSES, 0.0)
        for place, name in enumerate(names):
            own = 1 << place
            for others in range(1 << len(names)):
                if not others & own:
                    size = others.bit_count()
                    weight = factorial(size) * factorial(len(names) - size - 1) / factorial(len(names))
                    shares[name] += weight * float(worth_s[others | own] - worth_s[others]) / lost_s
        return shares

    @cached_property
    def actual_s(self) -> float:
        """Mean seconds of a step as it was."""
        return float(self.replay.steps_with_s(self.replay.actual_s).mean())

    @cached_property
    def ideal_s(self) -> float:
        """Mean seconds of a step in which nothing straggles."""
        return float(self._step_s(np.zeros((1, 1, 1))).mean())

    @cached_property
    def without_s(self) -> dict[str, float]:
        """Mean seconds of a step without each of ``CAUSES``, all else as it was."""
        return {
            cause: float(self.replay.steps_with_s(self.replay.actual_s - self.extra_s(cause)).mean())
            if cause in self.present
            else self.actual_s
            for cause in CAUSES
        }

    @cached_property
    def slowdowns(self) -> dict[str, float]:
        """Step as it was over the step without each of ``CAUSES``."""
        return {cause: self.actual_s / seconds for cause, seconds in self.without_s.items()}

    def verdict(self, slowdown: float) -> tuple[str, ...]:
        """Causes that count, worst first: by share.

        A cause counts when its share of the slowdown is ``COUNTS`` of an ideal step, or a step without it would be shorter by as
        much. Where none does, a job that does not straggle is healthy, and one that does suffers from what has half of
        it, if anything has.
        """
        by_share = sorted(CAUSES, key=lambda cause: -self.shares[cause])
        named = tuple(
            cause
            for cause in by_share
            if max(self.shares[cause] * (slowdown - 1.0), self.slowdowns[cause] - 1.0) >= COUNTS
        )
        if named:
            return named
        if slowdown <= STRAGGLES:
            return (HEALTHY,)
        return (by_share[0] if self.shares[by_share[0]] >= _MOST else UNNAMED,)

    def _coalitions_s(self, names: tuple[str, ...]) -> np.ndarray:
        """Mean seconds of a step with the parts of some causes only; bit i of the place stands for ``names[i]``."""
        parts = [self._balanced(name) for name in names]
        worth_s = np.empty(1 << len(names))
        for together in range(worth_s.size):
            extra = sum((part for place, part in enumerate(parts) if together >> place & 1), np.zeros((1, 1, 1)))
            worth_s[together] = self._step_s(extra).mean()
        return worth_s

    def _balanced(self, cause: str) -> np.ndarray:
        """The part of a cause with mean 0 in each kind of computation, as ideal durations are means."""
        extra = self.extra_s(cause)
        if cause == COMMUNICATION:
            return extra
        for kind in np.unique(self.replay.nodes.kind):
            mine = self.replay.nodes.kind == kind
            extra[:, mine] -= extra[:, mine].mean()
        return extra

    def _step_s(self, extra: np.ndarray) -> np.ndarray:
        seconds = self.replay.ideal_s[:, None] + extra
        return self.replay.steps_with_s(np.broadcast_to(seconds, self.replay.actual_s.shape))
