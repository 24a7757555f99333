"""A job as its command line describes it: the model, the sizes of its pipeline, and the split that its flags ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_balance.command_line import completed, read_command_line, topology_from_arguments
from megatron_balance.hugging_face import arguments_from_config
from megatron_balance.model import HybridPattern, ModelSpec, hybrid_pattern, layer_kinds
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.layout import Layout
from megatron_balance.topology import Topology

_TRAININGS_OWN = ("balanced_pipeline_", "varlen_packing", "straggler_trace")  # how our arguments begin
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


@dataclass(frozen=True)
class Job:
    """What there is to plan.

    Attributes:
        arguments: Megatron's arguments by name, as far as they are given.
        ignored: flags of the command line that do not matter to a plan.
        model: the model.
        topology: sizes of the pipeline and the step.
        pattern: layers of a hybrid model; else None.
    """

    arguments: Mapping[str, Any]
    ignored: tuple[str, ...]
    model: ModelSpec
    topology: Topology
    pattern: HybridPattern | None

    def layout_text(self, layout: Layout) -> str:
        """The value of the flag that gives Megatron this split."""
        return str(layout) if self.pattern is None else str(self.pattern.split(layout.layers))

    @property
    def layout_flag(self) -> str:
        return "--pipeline-model-parallel-layout" if self.pattern is None else "--hybrid-layer-pattern"

    @property
    def has_own_split(self) -> bool:
        """Whether its flags ask for another split than the uniform one."""
        return stock.has_own_split(self.arguments, self._pattern_stages)

    def own_split(self) -> Layout:
        """The split that the job's flags ask for.

        Raises:
            BalanceError: Megatron would refuse it.
        """
        model = self.model
        return stock.own_split(
            self.arguments, model.num_layers, model.mtp_num_layers, self.topology, self._pattern_stages
        )

    @property
    def _pattern_stages(self) -> tuple[str, ...]:
        return () if self.pattern is None else self.pattern.stages


def _first_layers(model: Mapping[str, Any], num_layers: int | None) -> dict[str, Any]:
    """The arguments of a config, its lists by layer cut to the fewer layers that a flag asks for."""
    if num_layers is None or not 0 < num_layers < model["num_layers"]:
        return dict(model)
    return {name: value[:num_layers] if isinstance(value, list) else value for name, value in model.items()}


def read_job(
    argv: Sequence[str],
    hf_config: str | None = None,
    num_microbatches: int | None = None,
    world_size: int | None = None,
    knows_layers: bool = True,
) -> Job:
    """Read a Megatron command line, on top of a Hugging Face config where one is given.

    Args:
        argv: Megatron's flags; a launcher and a script before them are passed over.
        hf_config: path of a ``config.json``; flags of the command line outrank it.
        num_microbatches: of a step; None takes it from the global batch.
        world_size: processes; None takes what the launcher starts, or else one model replica.
        knows_layers: whether a ``--spec``, whose layers may be any, is refused; else they are taken for Megatron's own.

    Raises:
        BalanceError: a value is missing or impossible; names it.
    """
    line = read_command_line(argv)
    model = (
        {} if hf_config is None else _first_layers(arguments_from_config(hf_config), line.arguments.get("num_layers"))
    )
    arguments = {**model, **line.arguments}
    pattern = hybrid_pattern(arguments)
    topology = topology_from_arguments(
        _with_virtual_stages(arguments, pattern),
        num_microbatches,
        line.world_size if world_size is None else world_size,
    )
    stock.refuse_virtual_stages_of_blocks(arguments, topology.virtual_size)
    arguments = completed(arguments)
    ours = [f"--{name.replace('_', '-')}" for name in line.arguments if name.startswith(_TRAININGS_OWN)]
    model = ModelSpec.from_arguments(arguments if knows_layers else {**arguments, "spec": None})
    return Job(arguments, (*line.ignored, *ours), model, topology, pattern)


def _with_virtual_stages(arguments: Mapping[str, Any], pattern: HybridPattern | None) -> Mapping[str, Any]:
    """Lets a flag for virtual stages say how many stages a pattern without any is to get.

    Megatron wants such a pattern to have its stages, which are what is planned here.
    """
    each = arguments.get("num_layers_per_virtual_pipeline_stage")
    asked = each or arguments.get("num_virtual_stages_per_pipeline_rank")
    if pattern is None or len(pattern.stages) > 1 or asked is None:
        return arguments
    without = {name: value for name, value in arguments.items() if name not in _PATTERNS}
    return without if each is None else {**without, "num_layers": len(layer_kinds(arguments))}
