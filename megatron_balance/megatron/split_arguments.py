"""A split in Megatron's arguments: a layout string, for a hybrid (Mamba) model borders in its pattern of layers.

What differs between Megatron's versions is asked of the code itself: which arguments there are, and what its own check of a
layout answers.
"""

from __future__ import annotations

from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.arguments import FLAG, LAST, Options
from megatron_balance.model import HybridPattern, hybrid_pattern, layer_kinds
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.layout import Layout
from megatron_balance.topology import Topology

LAYOUT = "pipeline_model_parallel_layout"
_PATTERN = "hybrid_layer_pattern"
_OLD_PATTERNS = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")  # validation moves them into `_PATTERN`
_REFUSED = object()
_MARK = "balanced_pipeline_layout"  # beside Megatron's own argument: what we wrote there


# --- reading ----------------------------------------------------------------------------------------------------------


def pattern_of(args: Any) -> HybridPattern | None:
    """The pattern of a hybrid model's layers, None for other models."""
    return hybrid_pattern(vars(args))


def argument_of(args: Any) -> str:
    """Name of the argument that holds the split."""
    return LAYOUT if pattern_of(args) is None else _PATTERN


def split_flag(args: Any, layout: Layout) -> str:
    """What a command line without ours would have to give for this split."""
    pattern = pattern_of(args)
    value = str(layout) if pattern is None else str(pattern.split(layout.layers))
    return f"--{argument_of(args).replace('_', '-')} '{value}'"


def num_layers(args: Any) -> int:
    """Layers of the model, validated or not."""
    return len(layer_kinds(vars(args)))


def is_ours(args: Any) -> bool:
    """Whether ``args`` hold what was written here before: tools validate the same arguments twice."""
    written = getattr(args, _MARK, None)
    return written is not None and getattr(args, argument_of(args), None) == written


# --- refusing ---------------------------------------------------------------------------------------------------------


def refuse_given_split(args: Any) -> None:
    """Refuse a split on the command line.

    Raises:
        BalanceError: names the flag.
    """
    layout = getattr(args, LAYOUT, None)
    if layout is not None:
        raise BalanceError(f"{FLAG} plans the layout itself: leave out --pipeline-model-parallel-layout {layout}")
    pattern = pattern_of(args)
    if pattern is None:
        return
    if not hasattr(args, _PATTERN):
        raise BalanceError(
            f"{FLAG} needs a Megatron with --hybrid-layer-pattern (megatron-core 0.17 or newer) to split a hybrid model:"
            " this one has no borders of stages in its patterns. Leave it out, or update Megatron"
        )
    if len(pattern.stages) > 1 and not args.use_checkpoint_args:  # a checkpoint's has those of its own split
        raise BalanceError(
            f"{FLAG} marks the stages itself: leave the | out of --hybrid-layer-pattern {pattern}; with virtual stages give"
            " --num-virtual-stages-per-pipeline-rank"
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def write_split(args: Any, layout: Layout) -> None:
    """Put a split into ``args``, before validation or after: Megatron builds its model of them later still."""
    pattern, name = pattern_of(args), argument_of(args)
    written = str(layout)
    if pattern is not None:
        written = str(pattern.split(layout.layers))
        for old in _OLD_PATTERNS:
            if hasattr(args, old):
                setattr(args, old, None)
    setattr(args, name, written)
    setattr(args, _MARK, written)


# --- what Megatron runs -----------------------------------------------------------------------------------------------


def mtp_stages(args: Any, options: Options, topology: Topology) -> tuple[int, ...] | None:
    """The stages in which multi-token prediction may stand; None is the last one only.

    Those of ``stock.mtp_stages``, where this Megatron sends on what it puts out.
    """
    if options.mtp_placement == LAST or not args.mtp_num_layers or not _places_mtp_apart():
        return None
    return stock.mtp_stages(topology, pattern_of(args) is not None)


def takes_mtp() -> bool:
    """Whether a layout may have multi-token prediction at all, which those of 0.13 may not."""
    return _checked("Et|mL") is not _REFUSED


def _places_mtp_apart() -> bool:
    """Whether Megatron can have multi-token prediction away from the head: its check of such a layout says so.

    Older ones put it beside the head whatever the layout says.
    """
    return _checked("Et|m|L") is True


def _checked(layout: str) -> object:
    """What Megatron's check of a layout of one layer and one depth of multi-token prediction returns."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        return PipelineParallelLayerLayout(layout, layout.count("|") + 1).validate_layer_layout(1, 1)
    except (AssertionError, NotImplementedError, TypeError, ValueError):
        return _REFUSED
