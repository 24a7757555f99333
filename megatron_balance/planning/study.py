"""What a plan is worth: beside Megatron's own splits and the user's, and if the head costs something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.memory import ChainMemory
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.chain import end_costs, prefix_costs, stage_costs
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.pipeline.memory import rank_peaks
from megatron_balance.pipeline.plan import step_seconds
from megatron_balance.schedule.simulate import Simulator, Timeline
from megatron_balance.topology import Topology

HEAD_SCALES = (0.5, 0.8, 1.2, 2.0)
YOURS = "your flags"


@dataclass(frozen=True)
class Alternative:
    """Another split of the same job.

    Attributes:
        name: by what it comes about.
        layout: its stages; None where it cannot be told.
        legal: whether Megatron would run it.
        step_s: simulated seconds of its training step; None where it is not legal.
        peak_bytes: of the rank that needs most memory; None where it is not legal or memory is not known.
        reason: why it is not legal, or does not fit the memory; else empty.
    """

    name: str
    layout: Layout | None
    legal: bool
    step_s: float | None = None
    peak_bytes: float | None = None
    reason: str = ""

    @property
    def usable(self) -> bool:
        return self.legal and not self.reason


@dataclass(frozen=True)
class HeadScale:
    """How a plan and its best rival do if the head costs ``scale`` times what was thought.

    Attributes:
        scale: of the head's cost.
        iteration_over_even: the plan's step over that of an even split of that work.
        gain: by which share the rival's step is longer than the plan's; None without a rival.
    """

    scale: float
    iteration_over_even: float
    gain: float | None


@dataclass(frozen=True)
class Judge:
    """Measures splits of one job.

    Attributes:
        costs: of the elements.
        simulator: of the schedule.
        memory: of the elements; None where it is not known.
        limit_bytes: that a rank may occupy; None is no limit.
    """

    costs: ChainCosts
    simulator: Simulator
    memory: ChainMemory | None = None
    limit_bytes: float | None = None

    @property
    def topology(self) -> Topology:
        return self.simulator.topology

    @property
    def even_step_s(self) -> float:
        """Seconds of a step if the same work could be cut into equal stages."""
        stages = self.topology.num_stages
        return step_seconds(self.simulator, (self.costs.total * (1 / stages),) * stages)

    def with_head(self, scale: float) -> Judge:
        """The same job with a head that costs ``scale`` times as much."""
        return replace(self, costs=replace(self.costs, head=self.costs.head * scale))

    def step_s(self, layout: Layout) -> float:
        return step_seconds(self.simulator, stage_costs(self.costs, layout.layers, layout.mtp_stage))

    def pipeline_s(self, layers: Sequence[int]) -> float:
        """Seconds of a step without the update, multi-token prediction in the last stage; quicker than ``step_s``."""
        before, ends = self._seconds
        stops = np.cumsum(layers)
        return self.simulator.step_s(*(before[:, stops] - before[:, stops - layers] + ends))

    @cached_property
    def _seconds(self) -> tuple[np.ndarray, np.ndarray]:
        return prefix_costs(self.costs), end_costs(self.costs, self.topology.num_stages)

    def timeline(self, layout: Layout) -> Timeline:
        stages = stage_costs(self.costs, layout.layers, layout.mtp_stage)
        return self.simulator.timeline([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])

    def peaks_bytes(self, layout: Layout) -> np.ndarray | None:
        """Peak of each rank, shape [PP]; None where memory is not known."""
        if self.memory is None:
            return None
        return rank_peaks(self.memory, self.topology, layout.layers, layout.mtp_stage)

    def fits(self, layout: Layout) -> bool:
        return not self._misfit(self.peaks_bytes(layout))

    def alternative(self, name: str, find_layout: Callable[[], Layout]) -> Alternative:
        """The split that ``find_layout`` returns, or the reason for which it raises a BalanceError."""
        try:
            layout = find_layout()
        except BalanceError as error:
            return Alternative(name, None, legal=False, reason=str(error))
        peaks = self.peaks_bytes(layout)
        return Alternative(
            name,
            layout,
            legal=True,
            step_s=self.step_s(layout),
            peak_bytes=None if peaks is None else float(peaks.max()),
            reason=self._misfit(peaks),
        )

    def _misfit(self, peaks: np.ndarray | None) -> str:
        if peaks is None or self.limit_bytes is None or peaks.max() <= self.limit_bytes:
            return ""
        rank = int(peaks.argmax())
        return f"does not fit: rank {rank} needs {peaks[rank] / 1e9:.1f} GB of {self.limit_bytes / 1e9:.1f} GB"


def alternatives(
    judge: Judge,
    mtp_num_layers: int,
    yours: Callable[[], Layout] | None = None,
    compared: Sequence[str] = (),
    *,
    mtp_last: bool = False,
    by_pattern: bool = False,
) -> list[Alternative]:
    """What Megatron's own flags give, what the user has now, and what they want compared.

    Args:
        judge: of the job.
        mtp_num_layers: multi-token-prediction layers.
        yours: finds the split that the job's own flags describe; None where they describe none but the uniform one.
        compared: layout strings.
        mtp_last: whether multi-token prediction must be in the last stage (Megatron core before 0.16).
        by_pattern: a hybrid model, for which Megatron refuses the account-for flags, and counts beside virtual stages.

    Raises:
        BalanceError: one of ``compared`` is no layout string.
    """
    num_layers, topology = len(judge.costs.layers), judge.topology

    def even(embedding: bool = False, loss: bool = False) -> Callable[[], Layout]:
        def find() -> Layout:
            if by_pattern and (embedding or loss):
                raise BalanceError("Megatron has no account-for flags for a hybrid model")
            return Layout.of(stock.even_split(num_layers, topology, embedding, loss), mtp_num_layers)

        return find

    def checked(find: Callable[[], Layout]) -> Callable[[], Layout]:
        def check() -> Layout:
            layout = find()
            stock.check_layout(layout, num_layers, mtp_num_layers, topology, mtp_last)
            return layout

        return check

    found = [judge.alternative("uniform", even())]
    if topology.num_stages > 1:
        found += [
            judge.alternative("E (account for embedding)", even(embedding=True)),
            judge.alternative("L (account for loss)", even(loss=True)),
            judge.alternative("E+L (account for both)", even(embedding=True, loss=True)),
            _NO_COUNTS if by_pattern and topology.virtual_size > 1 else _best_counts(judge, mtp_num_layers),
        ]
    if yours is not None:
        found.append(judge.alternative(YOURS, checked(yours)))
    for text in compared:
        layout = parse_layout(text)
        found.append(replace(judge.alternative(text, checked(lambda layout=layout: layout)), layout=layout))
    return found


_NO_COUNTS = Alternative(
    "first/last counts",
    None,
    legal=False,
    reason="Megatron cuts a hybrid model into virtual stages only where its pattern has a |",
)


def _best_counts(judge: Judge, mtp_num_layers: int) -> Alternative:
    """The fastest of all legal counts for first and last rank, of those that fit the memory where some do."""
    named = [
        (_counts_name(first, last), Layout.of(split, mtp_num_layers))
        for first, last, split in stock.counts(len(judge.costs.layers), judge.topology)
    ]
    if not named:
        return Alternative("first/last counts", None, legal=False, reason="no counts divide the layers evenly")
    named.sort(key=lambda each: judge.pipeline_s(each[1].layers))
    name, best = next((each for each in named if judge.fits(each[1])), named[0])
    return judge.alternative(name, lambda: best)


def _counts_name(first: int | None, last: int | None) -> str:
    return ", ".join(f"{end} {count}" for end, count in (("first", first), ("last", last)) if count is not None)


def best_rival(found: Sequence[Alternative], compared: Sequence[str] = ()) -> Alternative | None:
    """The fastest that Megatron's own flags give, what the user wants compared left out; None where none is usable."""
    usable = [one for one in found if one.usable and one.name not in (*compared, YOURS)]
    return min(usable, key=lambda one: one.step_s, default=None)


def sensitivity(judge: Judge, chosen: Layout, rival: Alternative | None) -> list[HeadScale]:
    """How ``chosen`` and ``rival`` do where the head costs more or less than thought."""
    found = []
    for scale in HEAD_SCALES:
        scaled = judge.with_head(scale)
        step_s = scaled.step_s(chosen)
        gain = None if rival is None else scaled.step_s(rival.layout) / step_s - 1
        found.append(HeadScale(scale, step_s / scaled.even_step_s, gain))
    return found
