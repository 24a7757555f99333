"""The plan: which layers each stage gets, what a step takes, and why."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megatron_balance import __version__, reading
from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text, write_text
from megatron_balance.pipeline.chain import stage_costs, uniform_layers
from megatron_balance.pipeline.layout import Layout
from megatron_balance.pipeline.memory import MemoryLimit, rank_peaks
from megatron_balance.pipeline.search import NEAR, find_split
from megatron_balance.reading import Scalar
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

_FORMAT = "megatron-balance plan"
_FORMAT_VERSION = 3  # 1 had no update_s, 2 neither mtp_stage nor memory
_REMEDY = "delete it to plan afresh, or pass another"


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        first_layer: index of its first layer, counted from 0.
        layers: how many it has.
        forward_s, backward_s: its seconds for one micro-batch, with embedding or head included.
        update_s: seconds after all micro-batches, once a step: gradient norm and optimizer; 0 where they are not known.
    """

    first_layer: int
    layers: int
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Plan:
    """A pipeline split and what it was chosen on.

    Attributes:
        topology: sizes of the job.
        stages: in the order in which data passes them; stage ``chunk * PP + rank`` is chunk ``chunk`` of that rank.
        mtp_num_layers: multi-token-prediction layers.
        mtp_stage: the stage that holds all of them; the last where there are none.
        embedding_in_layers, head_in_layers: (forward, backward) cost in mean layers.
        costs_source: where the costs come from.
        p2p_s: seconds that a transfer between stages was taken to last.
        step_s: simulated seconds of a training step, the update of the slowest rank included.
        even_step_s: the same if the work could be cut into equal stages.
        uniform_step_s: the same with Megatron's uniform split; None where Megatron refuses it.
        bound_s: seconds that no split with whole layers can beat.
        proven: the bound shows that no split is noticeably faster.
        peak_bytes: memory of each pipeline rank at its fullest; None where it is not known.
        limit_bytes: that a rank's memory was not to exceed; None for no limit.
        limited_by: a sentence on what keeps the step from being shorter.
        fingerprinted: names and values of the model, data and hardware that the plan holds for.
        created_by: version of this package.
    """

    topology: Topology
    stages: tuple[Stage, ...]
    mtp_num_layers: int
    mtp_stage: int
    embedding_in_layers: tuple[float, float]
    head_in_layers: tuple[float, float]
    costs_source: str
    p2p_s: float
    step_s: float
    even_step_s: float
    uniform_step_s: float | None
    bound_s: float
    proven: bool
    peak_bytes: tuple[float, ...] | None
    limit_bytes: float | None
    limited_by: str
    fingerprinted: Mapping[str, Scalar]
    created_by: str

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def split(self) -> Layout:
        """What each stage holds."""
        return Layout.of(self.layers, self.mtp_num_layers, self.mtp_stage)

    @property
    def layout(self) -> str:
        """The value for ``--pipeline-model-parallel-layout``."""
        return str(self.split)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.fingerprinted)

    @property
    def update_s(self) -> float:
        """Seconds of the step that follow the pipeline: those of the rank that updates longest."""
        return _update_s(self.stages, self.topology.pipeline_size)

    @property
    def max_stage_over_mean(self) -> float:
        """Seconds of the largest stage over those of the mean stage."""
        seconds = [stage.total_s for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds)

    @property
    def busy_share(self) -> tuple[float, ...]:
        """Share of the step that each stage's passes take; those of a rank's chunks add up."""
        return tuple(self.topology.num_microbatches * stage.total_s / self.step_s for stage in self.stages)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time until the update in which they wait."""
        return 1.0 - sum(self.busy_share) * self.step_s / (self.topology.pipeline_size * (self.step_s - self.update_s))

    def check_fits(
        self, fingerprinted: Mapping[str, Scalar], topology: Topology, name: str = "the plan", remedy: str = _REMEDY
    ) -> None:
        """Refuse a plan of another job.

        Args:
            fingerprinted: names and values of this job's model, data and hardware.
            topology: this job's sizes.
            name: what to call the plan in the error, such as the name of its file.
            remedy: what to do about it.

        Raises:
            BalanceError: names what differs.
        """
        differences = [
            f"{key} is {wanted.get(key)!r}, planned for {planned.get(key)!r}"
            for wanted, planned in ((fingerprinted, self.fingerprinted), (asdict(topology), asdict(self.topology)))
            for key in sorted({*wanted, *planned})
            if wanted.get(key) != planned.get(key)
        ]
        if differences:
            raise BalanceError(f"{name} is of another model or topology: {'; '.join(differences)}; {remedy}")

    def to_json(self) -> str:
        """The text of a plan file: the plan's fields, its layout and its fingerprint."""
        head = {"format": _FORMAT, "format_version": _FORMAT_VERSION}
        derived = {"layout": self.layout, "fingerprint": self.fingerprint}
        return json.dumps({**head, **derived, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "the plan") -> Plan:
        """Read what ``to_json`` wrote.

        Args:
            text: contents of a plan file, which may come from anywhere.
            name: what to call it in errors.

        Raises:
            BalanceError: this is not a whole, undamaged plan of this format; names the key and what to do.
        """
        try:
            return _read_plan(reading.parse_object(text))
        except reading.DamageError as damage:
            raise BalanceError(f"{name} {damage}; {_REMEDY}") from damage


def fingerprint(fingerprinted: Mapping[str, Scalar]) -> str:
    """SHA-256 of the mapping's canonical JSON, in hexadecimal."""
    canonical = json.dumps(dict(fingerprinted), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def make_plan(
    costs: ChainCosts,
    topology: Topology,
    fingerprinted: Mapping[str, Scalar],
    mtp_num_layers: int = 0,
    p2p_s: float = 0.0,
    *,
    memory: MemoryLimit | None = None,
    allow_empty: bool = False,
    mtp_stages: Sequence[int] | None = None,
    starts: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = lambda text: None,
    sharpens_bound: bool = True,
) -> Plan:
    """Search the split and say what it gives.

    Args:
        costs: of embedding, layers and head, for one micro-batch of this topology.
        topology: sizes of the job.
        fingerprinted: names and values of the model, data and hardware that the plan holds for.
        mtp_num_layers: multi-token-prediction layers.
        p2p_s: seconds that a transfer between stages takes.
        memory, allow_empty, mtp_stages, starts, say, sharpens_bound: as for ``find_split``.

    Raises:
        BalanceError: more stages than elements, a schedule that Megatron refuses, or no split fits the memory.
    """
    simulator = Simulator(topology, p2p_s)
    split = find_split(
        costs,
        simulator,
        memory=memory,
        allow_empty=allow_empty,
        mtp_stages=mtp_stages,
        starts=starts,
        say=say,
        sharpens_bound=sharpens_bound,
    )
    uniform = uniform_layers(len(costs.layers), topology.num_stages)
    uniform_step_s = None if uniform is None else step_seconds(simulator, stage_costs(costs, uniform))
    layers, mtp_stage = split.layers, split.mtp_stage
    stages = stage_costs(costs, layers, mtp_stage)
    step_s = step_seconds(simulator, stages)
    even = (costs.total * (1 / topology.num_stages),) * topology.num_stages
    even_step_s, even_update_s = step_seconds(simulator, even), _update_s(even, topology.pipeline_size)
    return Plan(
        topology=topology,
        stages=tuple(
            Stage(int(stop) - count, count, **asdict(stage))
            for stop, count, stage in zip(np.cumsum(layers), layers, stages, strict=True)
        ),
        mtp_num_layers=mtp_num_layers,
        mtp_stage=mtp_stage,
        embedding_in_layers=costs.in_layers(costs.embedding),
        head_in_layers=costs.in_layers(costs.head),
        costs_source=costs.source,
        p2p_s=float(p2p_s),
        step_s=step_s,
        even_step_s=even_step_s,
        uniform_step_s=uniform_step_s,
        bound_s=min(split.bound_s, step_s),
        proven=split.proven or step_s <= split.bound_s * (1 + NEAR),
        peak_bytes=None if memory is None else tuple(rank_peaks(memory.chain, topology, layers, mtp_stage).tolist()),
        limit_bytes=None if memory is None or memory.limit_bytes == math.inf else float(memory.limit_bytes),
        limited_by=_limited_by(
            costs,
            stages,
            topology,
            layers,
            step_s - _update_s(stages, topology.pipeline_size),
            even_step_s - even_update_s,
        ),
        fingerprinted=dict(fingerprinted),
        created_by=f"megatron_balance {__version__}",
    )


def save_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the plan file; a reader finds the old file or the new one, never a part.

    Raises:
        BalanceError: the folder does not exist or cannot be written.
    """
    write_text(path, plan.to_json(), f"the plan file {path}")


def find_plan(path: str | os.PathLike[str]) -> Plan | None:
    """The plan that is kept in a file; None where there is none yet.

    Raises:
        BalanceError: there is something else, or a plan that is damaged.
    """
    return load_plan(path) if os.path.exists(path) else None


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    Raises:
        BalanceError: it cannot be read, or is not a whole, undamaged plan.
    """
    name = f"the plan file {path}"
    return Plan.from_json(read_text(path, name), name)


def step_seconds(simulator: Simulator, stages: Sequence[ElementCost]) -> float:
    """The pipeline's seconds, and after it, when the gradient norm has made all ranks meet, those of the longest update."""
    pipeline_s = simulator.step_s([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])
    return pipeline_s + _update_s(stages, simulator.topology.pipeline_size)


def _update_s(stages: Sequence[Stage | ElementCost], pipeline_size: int) -> float:
    return max(sum(stage.update_s for stage in stages[rank::pipeline_size]) for rank in range(pipeline_size))


def _limited_by(
    costs: ChainCosts,
    stages: Sequence[ElementCost],
    topology: Topology,
    layers: tuple[int, ...],
    step_s: float,
    even_step_s: float,
) -> str:
    """What keeps the step, the update left out, from being shorter: an indivisible element, whole layers, or the bubble."""
    if topology.num_stages == 1:
        return "the work itself: one rank has the whole model"
    layer_s = costs.mean_layer.total_s
    even_layers = costs.total.total_s / layer_s / topology.num_stages
    for name, element, own_layers in (("head", costs.head, layers[-1]), ("embedding", costs.embedding, layers[0])):
        if own_layers == 0 and element.total_s > even_layers * layer_s:
            return (
                f"the {name}, which cannot be cut: alone it takes {element.total_s / layer_s:.2f} layers, an even "
                f"stage {even_layers:.2f}; fewer stages, or tensor parallelism, would help"
            )
    if step_s > 1.005 * even_step_s:
        largest = max(stage.total_s for stage in stages) / layer_s
        return (
            f"whole layers: an even stage would take {even_layers:.2f} layers, the largest takes {largest:.2f} and the "
            f"step {100 * (step_s / even_step_s - 1):.1f} % longer"
        )
    bubble = 1 - topology.num_microbatches * costs.total.total_s / (topology.pipeline_size * step_s)
    share = f"{100 * bubble:.1f} % of the step"
    return f"the pipeline bubble alone, {share}: more micro-batches or virtual stages shrink it"


def _read_plan(values: dict[str, Any]) -> Plan:
    reading.check_format(values, _FORMAT, _FORMAT_VERSION, "a plan")
    reading.check_keys(values, {*_READERS, "format", "format_version", "layout", "fingerprint"})
    plan = Plan(**{key: reader(values[key], key) for key, reader in _READERS.items()})
    stages = f"{plan.topology.num_stages} stages, as the topology has"
    reading.checked(len(plan.stages), "the number of stages", len(plan.stages) == plan.topology.num_stages, stages)
    reading.checked(plan.mtp_stage, "mtp_stage", plan.mtp_stage < len(plan.stages), f"below {len(plan.stages)}")
    for key, expected in (("layout", plan.layout), ("fingerprint", plan.fingerprint)):
        reading.checked(values[key], key, values[key] == expected, f"{expected!r}, as the other values have it")
    return plan


def _read_topology(value: Any, key: str) -> Topology:
    readers: dict[str, reading.Reader] = {field.name: reading.count for field in fields(Topology)}
    readers |= {"microbatch_group_size": reading.optional(reading.count), "overlap_moe": reading.flag}
    try:
        return Topology(**reading.mapping(value, key, readers))
    except BalanceError as error:
        raise reading.DamageError(f"is damaged: {key} is impossible ({error})") from error


def _read_stages(value: Any, key: str) -> tuple[Stage, ...]:
    readers = {
        "first_layer": reading.count,
        "layers": reading.count,
        "forward_s": reading.number,
        "backward_s": reading.number,
        "update_s": reading.number,
    }
    reading.checked(value, key, isinstance(value, list), "a list")
    stages = tuple(Stage(**reading.mapping(each, f"{key}[{place}]", readers)) for place, each in enumerate(value))
    first_layer = 0
    for place, stage in enumerate(stages):
        where = f"{key}[{place}].first_layer"
        reading.checked(stage.first_layer, where, stage.first_layer == first_layer, f"{first_layer}")
        first_layer += stage.layers
    reading.positive(sum(stage.total_s for stage in stages), f"the seconds of all {key}")
    return stages


_READERS: dict[str, reading.Reader] = {
    "topology": _read_topology,
    "stages": _read_stages,
    "mtp_num_layers": reading.count,
    "mtp_stage": reading.count,
    "embedding_in_layers": reading.pair,
    "head_in_layers": reading.pair,
    "costs_source": reading.text,
    "p2p_s": reading.number,
    "step_s": reading.positive,
    "even_step_s": reading.positive,
    "uniform_step_s": reading.optional(reading.positive),
    "bound_s": reading.number,
    "proven": reading.flag,
    "peak_bytes": reading.optional(reading.numbers),
    "limit_bytes": reading.optional(reading.number),
    "limited_by": reading.text,
    "fingerprinted": reading.scalars,
    "created_by": reading.text,
}
