"""A job as its command line describes it: the model, the sizes of its pipeline, and the split that its flags ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_balance.command_line import read_command_line
from megatron_balance.errors import BalanceError
from megatron_balance.hugging_face import arguments_from_config
from megatron_balance.model import HybridPattern, ModelSpec
from megatron_balance.model.arguments import hybrid_pattern
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.planning import stock
from megatron_balance.topology import Topology

_LAYOUT = "pipeline_model_parallel_layout"
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_OWN_BLOCKS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_COUNTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


@dataclass(frozen=True)
class Job:
    """What there is to plan.

    Attributes:
        arguments: Megatron's arguments by name, as far as they are given.
        ignored: flags of the command line that do not matter to a plan.
        model: the model.
        topology: sizes of the pipeline and the step.
        pattern: layers of a hybrid model; else None.
        notes: what was assumed, for the user.
    """

    arguments: Mapping[str, Any]
    ignored: tuple[str, ...]
    model: ModelSpec
    topology: Topology
    pattern: HybridPattern | None
    notes: tuple[str, ...]

    def layout_text(self, layout: Layout) -> str:
        """The value of the flag that gives Megatron this split."""
        return str(layout) if self.pattern is None else str(self.pattern.split(layout.layers))

    @property
    def layout_flag(self) -> str:
        return "--pipeline-model-parallel-layout" if self.pattern is None else "--hybrid-layer-pattern"

    @property
    def has_own_split(self) -> bool:
        """Whether its flags ask for another split than the uniform one."""
        given = [self.arguments.get(name) for name in (_LAYOUT, *_COUNTS)]
        account = any(self.arguments.get(name) for name in _ACCOUNT)
        return account or any(value is not None for value in given) or len(self._pattern_stages) > 1

    def own_split(self) -> Layout:
        """The split that the job's flags ask for.

        Raises:
            BalanceError: Megatron would refuse it.
        """
        arguments, layers, mtp = self.arguments, self.model.num_layers, self.model.mtp_num_layers
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

        It cannot load a rank without any layer, as its only stage would make one.
        """
        return self.topology.virtual_size > 1

    @property
    def _pattern_stages(self) -> tuple[str, ...]:
        return () if self.pattern is None else self.pattern.stages


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
        num_microbatches: of a step; None takes it from ``--global-batch-size``.
        world_size: processes; None is one model replica.

    Raises:
        BalanceError: a value is missing or impossible; names it.
    """
    line = read_command_line(argv)
    arguments = {**(arguments_from_config(hf_config) if hf_config is not None else {}), **line.arguments}
    pattern = hybrid_pattern(arguments)
    notes: list[str] = []
    topology = _topology(arguments, pattern, num_microbatches, world_size, notes)
    if topology.virtual_size > 1 and any(arguments.get(name) for name in _OWN_BLOCKS):
        raise BalanceError(
            "Megatron cannot build layers that each have a configuration of their own in several virtual stages a rank: leave"
            " out --num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"
        )
    return Job(arguments, tuple(line.ignored), ModelSpec.from_arguments(arguments), topology, pattern, tuple(notes))


def _topology(
    arguments: Mapping[str, Any],
    pattern: HybridPattern | None,
    num_microbatches: int | None,
    world_size: int | None,
    notes: list[str],
) -> Topology:
    tensor, pipeline, context, micro_batch = (
        _size(arguments, name)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "micro_batch_size",
        )
    )
    replica = tensor * pipeline * context
    data_size, rest = divmod(replica if world_size is None else world_size, replica)
    if rest or data_size < 1:
        raise BalanceError(
            f"--world-size {world_size}: tensor, pipeline and context parallel sizes need a multiple of"
            f" {tensor} * {pipeline} * {context} = {replica} processes"
        )
    if num_microbatches is None:
        num_microbatches = _num_microbatches(arguments, micro_batch * data_size)
        if world_size is None:
            notes.append(
                f"{num_microbatches} micro-batches a step, if these {replica} processes are all: give --world-size N where"
                " there are more"
            )
    return Topology(
        pipeline_size=pipeline,
        num_microbatches=num_microbatches,
        virtual_size=_virtual_size(arguments, pattern, pipeline, notes),
        micro_batch_size=micro_batch,
        tensor_size=tensor,
        context_size=context,
        data_size=data_size,
        microbatch_group_size=arguments.get("microbatch_group_size_per_vp_stage"),
    )


def _size(arguments: Mapping[str, Any], name: str) -> int:
    value = 1 if arguments.get(name) is None else arguments[name]
    if value < 1:
        raise BalanceError(f"--{name.replace('_', '-')} {value}: give 1 or more")
    return value


def _num_microbatches(arguments: Mapping[str, Any], sequences: int) -> int:
    batch = arguments.get("global_batch_size")
    if batch is None:
        raise BalanceError(
            "the number of micro-batches is not known: give --global-batch-size, or --num-microbatches M"
        )
    if batch < 1 or batch % sequences:
        raise BalanceError(
            f"--global-batch-size {batch} is no multiple of the {sequences} sequences that one micro-batch takes on all"
            " data-parallel ranks: change it, or give --num-microbatches M"
        )
    return batch // sequences


def _virtual_size(arguments: Mapping[str, Any], pattern: HybridPattern | None, pipeline: int, notes: list[str]) -> int:
    """Stages on each rank, from whichever of Megatron's flags gives them."""
    layout, per_rank, per_stage = map(
        arguments.get, (_LAYOUT, "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    )
    if layout is not None:
        return _chunks(len(parse_layout(str(layout)).layers), pipeline, "--pipeline-model-parallel-layout")
    if pattern is not None and len(pattern.stages) > 1:
        return _chunks(len(pattern.stages), pipeline, "--hybrid-layer-pattern")
    if per_rank is not None and per_stage is not None:
        raise BalanceError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank both give the number of"
            " virtual stages: leave one out"
        )
    if per_rank is not None:
        return _size(arguments, "num_virtual_stages_per_pipeline_rank")
    if per_stage is None:
        return 1
    num_layers = _size(arguments, "num_layers")
    size = max(1, round(num_layers / (pipeline * _size(arguments, "num_layers_per_virtual_pipeline_stage"))))
    if num_layers != size * pipeline * per_stage:
        notes.append(f"{size} virtual stages a rank: {num_layers} layers / ({pipeline} ranks * {per_stage}), rounded")
    return size


def _chunks(stages: int, pipeline: int, flag: str) -> int:
    if stages % pipeline:
        raise BalanceError(f"{flag} has {stages} stages, no multiple of --pipeline-model-parallel-size {pipeline}")
    return stages // pipeline
