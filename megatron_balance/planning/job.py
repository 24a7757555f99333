"""A job as its command line describes it: the model, the sizes of its pipeline, and the split that its flags ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.command_line import completed, read_command_line, topology_from_arguments
from megatron_balance.errors import BalanceError
from megatron_balance.hugging_face import arguments_from_config
from megatron_balance.model import HybridPattern, ModelSpec, hybrid_pattern
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.planning import stock
from megatron_balance.topology import Topology

_LAYOUT = "pipeline_model_parallel_layout"
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_COUNTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_OWN_BLOCKS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")


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
        return bool(self._ways_given)

    @property
    def _ways_given(self) -> list[str]:
        """In which ways its flags ask for a split."""
        arguments = self.arguments
        ways = {
            "--pipeline-model-parallel-layout": arguments.get(_LAYOUT) is not None,
            "| in the pattern": len(self._pattern_stages) > 1,
            "first and last counts": any(arguments.get(name) is not None for name in _COUNTS),
            "account-for flags": any(arguments.get(name) for name in _ACCOUNT),
        }
        return [way for way, given in ways.items() if given]

    def own_split(self) -> Layout:
        """The split that the job's flags ask for.

        Raises:
            BalanceError: Megatron would refuse it.
        """
        arguments, layers, mtp = self.arguments, self.model.num_layers, self.model.mtp_num_layers
        if len(self._ways_given) > 1:
            raise BalanceError(f"Megatron takes one of {' and '.join(self._ways_given)}: leave the others out")
        if (text := arguments.get(_LAYOUT)) is not None:
            return parse_layout(str(text))
        if len(self._pattern_stages) > 1:
            return Layout.of([len(stage) for stage in self._pattern_stages], mtp)
        if any(arguments.get(name) is not None for name in _COUNTS):
            return Layout.of(stock.counted_split(layers, self.topology, *map(arguments.get, _COUNTS)), mtp)
        embedding, loss = (bool(arguments.get(name)) for name in _ACCOUNT)
        return Layout.of(stock.even_split(layers, self.topology, embedding, loss), mtp)

    @property
    def runs_empty_stages(self) -> bool:
        """Whether a stage between the first and the last may be without layers, as Megatron core from 0.14 on runs them.

        It cannot load a rank without any layer, as its only stage would make one, nor run such a stage of a hybrid model. The
        schedule that combines passes (``overlap_moe``) has not been tried without layers.
        """
        return self.topology.virtual_size > 1 and not self.topology.overlap_moe and self.pattern is None

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
) -> Job:
    """Read a Megatron command line, on top of a Hugging Face config where one is given.

    Args:
        argv: Megatron's flags; a launcher and a script before them are passed over.
        hf_config: path of a ``config.json``; flags of the command line outrank it.
        num_microbatches: of a step; None takes it from the global batch.
        world_size: processes; None takes what the launcher starts, or else one model replica.

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
    if topology.virtual_size > 1 and any(arguments.get(name) for name in _OWN_BLOCKS):
        raise BalanceError(
            "Megatron cannot build layers that each have a configuration of their own in several virtual stages a rank: leave"
            " out --num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"
        )
    overlap_moe = bool(arguments.get("overlap_moe_expert_parallel_comm"))
    topology, arguments = replace(topology, overlap_moe=overlap_moe), completed(arguments)
    ours = [f"--{name.replace('_', '-')}" for name in line.arguments if name.startswith("balanced_pipeline_")]
    return Job(arguments, (*line.ignored, *ours), ModelSpec.from_arguments(arguments), topology, pattern)


def _with_virtual_stages(arguments: Mapping[str, Any], pattern: HybridPattern | None) -> Mapping[str, Any]:
    """Lets ``--num-virtual-stages-per-pipeline-rank`` say how many stages a pattern without any is to get.

    Megatron wants such a pattern to have its stages, which are what is planned here.
    """
    if pattern is None or len(pattern.stages) > 1 or arguments.get("num_virtual_stages_per_pipeline_rank") is None:
        return arguments
    return {name: value for name, value in arguments.items() if name not in _PATTERNS}
