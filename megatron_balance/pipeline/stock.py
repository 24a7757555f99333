"""What Megatron's own flags make of a number of layers, and what it refuses.

Source: ``megatron/core/transformer/transformer_config.py`` (the checks) and ``transformer_block.py``
(``get_num_layers_to_build``), the same in Megatron core 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.topology import Topology

_COUNTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def has_own_split(arguments: Mapping[str, Any], pattern_stages: Sequence[str] = ()) -> bool:
    """Whether ``arguments`` ask for another split than the uniform one."""
    return bool(_ways_given(arguments, pattern_stages))


def _ways_given(arguments: Mapping[str, Any], pattern_stages: Sequence[str]) -> list[str]:
    """In which ways they do."""
    ways = {
        "--pipeline-model-parallel-layout": arguments.get("pipeline_model_parallel_layout") is not None,
        "| in the pattern": len(pattern_stages) > 1,
        "first and last counts": any(arguments.get(name) is not None for name in _COUNTS),
        "account-for flags": any(arguments.get(name) for name in _ACCOUNT),
    }
    return [way for way, given in ways.items() if given]


def own_split(
    arguments: Mapping[str, Any],
    num_layers: int,
    mtp_num_layers: int,
    topology: Topology,
    pattern_stages: Sequence[str] = (),
) -> Layout:
    """The split that ``arguments``, Megatron's by name, ask for.

    Args:
        arguments: with a layout, counts for the first and the last rank, embedding and loss as layers, or none of them.
        num_layers, mtp_num_layers: of the model.
        topology: sizes of the pipeline.
        pattern_stages: letters of each stage of a hybrid model's pattern.

    Raises:
        BalanceError: Megatron would refuse it.
    """
    if len(ways := _ways_given(arguments, pattern_stages)) > 1:
        raise BalanceError(f"Megatron takes one of {' and '.join(ways)}: leave the others out")
    if len(pattern_stages) > 1:
        return Layout.of([len(stage) for stage in pattern_stages], mtp_num_layers)
    if (text := arguments.get("pipeline_model_parallel_layout")) is not None:
        return parse_layout(str(text))
    if any(arguments.get(name) is not None for name in _COUNTS):
        split = counted_split(num_layers, topology, *map(arguments.get, _COUNTS))
    else:
        split = even_split(num_layers, topology, *(bool(arguments.get(name)) for name in _ACCOUNT))
    return Layout.of(split, mtp_num_layers)


def even_split(num_layers: int, topology: Topology, embedding: bool = False, loss: bool = False) -> tuple[int, ...]:
    """The split without a flag, or with those by which embedding, loss or both count as a layer.

    Args:
        num_layers: transformer layers.
        topology: sizes of the pipeline.
        embedding: ``--account-for-embedding-in-pipeline-split``.
        loss: ``--account-for-loss-in-pipeline-split``.

    Raises:
        BalanceError: Megatron refuses it; says why.
    """
    counted = num_layers + embedding + loss
    each, rest = divmod(counted, topology.num_stages)
    if rest:
        raise BalanceError(f"{_sum(num_layers, embedding, loss)} are no multiple of {_stages(topology)}")
    layers = [each] * topology.num_stages
    layers[0] -= embedding
    layers[-1] -= loss
    if min(layers) < 0:
        raise BalanceError(f"{num_layers} layers are too few for {_stages(topology)}")
    return tuple(layers)


def counted_split(num_layers: int, topology: Topology, first: int | None, last: int | None) -> tuple[int, ...]:
    """The split with given layers on the first and the last rank, over their chunks; None is as many as the others.

    Raises:
        BalanceError: Megatron refuses it; says why.
    """
    ranks, chunks = topology.pipeline_size, topology.virtual_size
    given = [count for count in (first, last) if count is not None]
    if len(given) > ranks:
        raise BalanceError("a single rank cannot have both counts")
    for count in given:
        if count < 1 or count % chunks:
            raise BalanceError(f"{count} layers on a rank are no positive multiple of its {chunks} virtual stages")
    middle_ranks, middle = ranks - len(given), num_layers - sum(given)
    if bool(middle_ranks) != bool(middle) or middle < 0:
        raise BalanceError(f"{middle} layers are left for {middle_ranks} ranks between")
    if middle_ranks and middle % (middle_ranks * chunks):
        raise BalanceError(
            f"the {middle} layers left are no multiple of {middle_ranks} ranks * {chunks} virtual stages"
        )
    of_ranks = [middle // middle_ranks if middle_ranks else 0] * ranks
    if first is not None:
        of_ranks[0] = first
    if last is not None:
        of_ranks[-1] = last
    return tuple(count // chunks for count in of_ranks) * chunks


def counts(num_layers: int, topology: Topology) -> Iterator[tuple[int | None, int | None, tuple[int, ...]]]:
    """Every legal pair of counts for the first and the last rank, with its split; each split once."""
    if topology.pipeline_size < 2:
        return
    met = set()
    per_rank = [None, *range(topology.virtual_size, num_layers + 1, topology.virtual_size)]
    for first in per_rank:
        for last in per_rank:
            if first is None and last is None:
                continue
            try:
                split = counted_split(num_layers, topology, first, last)
            except BalanceError:
                continue
            if split not in met:
                met.add(split)
                yield first, last, split


def check_layout(layout: Layout, num_layers: int, mtp_num_layers: int, topology: Topology, mtp_last: bool) -> None:
    """Refuse a layout that Megatron would not take for this job.

    Args:
        layout: stages with their layers.
        num_layers, mtp_num_layers: of the model.
        topology: sizes of the pipeline.
        mtp_last: whether ``m`` must stand in the last stage (Megatron core before 0.16).

    Raises:
        BalanceError: says why.
    """
    stages, ranks = len(layout.layers), topology.pipeline_size
    if stages != topology.num_stages:
        remedy = f"; plan for --num-virtual-stages-per-pipeline-rank {stages // ranks} to compare it"
        raise BalanceError(f"it has {stages} stages, this job {_stages(topology)}{'' if stages % ranks else remedy}")
    if sum(layout.layers) != num_layers:
        raise BalanceError(f"it has {sum(layout.layers)} layers, the model {num_layers}")
    if sum(layout.mtp) != mtp_num_layers:
        raise BalanceError(f"it has {sum(layout.mtp)} m, the model {mtp_num_layers} multi-token-prediction layers")
    if mtp_num_layers and mtp_last and not layout.mtp[-1]:
        raise BalanceError("m must stand beside L in Megatron before 0.16")
    if any(layout.mtp[:-ranks]):
        raise BalanceError("m must stand in the last virtual stage of its rank")
    if empty := layout.empty_ranks(ranks):
        raise BalanceError(
            f"pipeline rank {empty[0]} has no layer, and Megatron cannot load a checkpoint into such a rank"
        )


def refuse_virtual_stages_of_blocks(arguments: Mapping[str, Any], virtual_size: int) -> None:
    """Megatron builds layers with a configuration of their own as if each rank had one stage, in every version so far.

    Raises:
        BalanceError: this job has more.
    """
    names = [f"heterogeneous_layers_config_{what}" for what in ("path", "encoded_json")]
    if virtual_size > 1 and any(arguments.get(name) for name in names):
        raise BalanceError(
            f"Megatron cannot build layers that each have a configuration of their own in {virtual_size} virtual stages a"
            " rank: leave out --num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"
        )


def may_leave_empty(topology: Topology, by_pattern: bool) -> bool:
    """Whether stages in the middle may hold no layer, as Megatron core from 0.14 on runs them.

    A `TransformerBlock` without layers hands on a copy of what it gets. A hybrid model's stack (``by_pattern``) hands on that
    itself, which the schedule frees as soon as it is sent: the losses are wrong. And no version can load a checkpoint into a
    rank without any parameter, as one is whose only stage is empty, or all of whose stages are (``Layout.empty_ranks``). The
    schedule that combines passes (``overlap_moe``) goes layer by layer, and has not been tried without any.
    """
    return topology.virtual_size > 1 and not topology.overlap_moe and not by_pattern


def mtp_stages(topology: Topology, by_pattern: bool) -> tuple[int, ...] | None:
    """Stages in which Megatron core 0.16 and newer runs multi-token prediction; None is the last one only.

    The last one of each rank but the first. Megatron lets the first rank pass too, which would then have the word embedding
    twice, and train something else. The schedule that combines passes (``overlap_moe``) puts the losses of multi-token
    prediction beside it, and a hybrid model's pattern (``by_pattern``) has no place for it: the head's stage is safe there.
    """
    if topology.overlap_moe or by_pattern:
        return None
    first = topology.num_stages - topology.pipeline_size
    return tuple(range(min(first + 1, topology.num_stages - 1), topology.num_stages))


def _sum(num_layers: int, embedding: bool, loss: bool) -> str:
    return " + ".join([f"{num_layers} layers", *["embedding"] * embedding, *["loss"] * loss])


def _stages(topology: Topology) -> str:
    if topology.virtual_size == 1:
        return f"{topology.pipeline_size} stages"
    return f"{topology.pipeline_size} ranks * {topology.virtual_size} virtual stages"
