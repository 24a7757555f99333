"""A split as the text that a training framework takes: Megatron-LM (with layouts or without), Megatron-Bridge or DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron_balance.errors import BalanceError

FORMATS = ("megatron", "layers", "bridge", "deepspeed")


def bridge_line(layout: str, virtual_size: int) -> str:
    """Lines for a Megatron-Bridge recipe; ``cfg.model`` is a ``TransformerConfig``, which takes the layout string.

    Source: recipes of github.com/NVIDIA-NeMo/Megatron-Bridge, which set it the same way. The flags that a recipe may have
    set otherwise would be refused beside a layout.
    """
    virtual = virtual_size if virtual_size > 1 else None
    return "\n".join(
        [
            f"cfg.model.pipeline_model_parallel_layout = {layout!r}",
            f"cfg.model.virtual_pipeline_model_parallel_size = {virtual}",
            "cfg.model.account_for_embedding_in_pipeline_split = False",
            "cfg.model.account_for_loss_in_pipeline_split = False",
            "cfg.model.num_layers_in_first_pipeline_stage = None",
            "cfg.model.num_layers_in_last_pipeline_stage = None",
        ]
    )


def layers_flags(layers: Sequence[int], virtual_size: int, mtp_num_layers: int, mtp_stage: int) -> str:
    """The flags of a Megatron-LM without layouts that carries our patch `layer-assignment`.

    Args:
        layers: transformer layers of each stage, in the order in which data pass them.
        virtual_size: stages on each rank.
        mtp_num_layers: multi-token-prediction layers, which such a Megatron builds in the last stage, like its last layer.
        mtp_stage: the stage that the plan has them in.

    Raises:
        BalanceError: it cannot run the plan.
    """
    if mtp_num_layers and (mtp_stage != len(layers) - 1 or layers[-1] == 0):
        raise BalanceError(
            f"a Megatron without layouts builds multi-token prediction in the last stage of {len(layers)}, like the layer"
            f" before it; this plan has it in stage {mtp_stage} and {layers[-1]} layers in the last: plan with"
            " --mtp-placement last, or on fewer stages"
        )
    virtual = f"--num-virtual-stages-per-pipeline-rank {virtual_size} " if virtual_size > 1 else ""
    return f"{virtual}--pipeline-layers {' '.join(map(str, layers))}"


def deepspeed_parts(layers: Sequence[int], virtual_size: int = 1, mtp_num_layers: int = 0) -> tuple[int, ...]:
    """The indices into the list of layer specs between which each stage lies, ascending, from 0 to their number.

    The assumed list: one spec for the embedding, one a transformer layer, one for the head.

    Args:
        layers: transformer layers of each stage.
        virtual_size: stages on each rank; DeepSpeed runs one.
        mtp_num_layers: multi-token-prediction layers, for which DeepSpeed has no spec.

    Raises:
        BalanceError: DeepSpeed cannot run it.
    """
    if virtual_size > 1:
        raise BalanceError(
            f"DeepSpeed's pipeline has one stage a rank, this plan {virtual_size}: plan without virtual stages for"
            " --format deepspeed"
        )
    if mtp_num_layers:
        raise BalanceError("--format deepspeed has no place for multi-token prediction: plan without --mtp-num-layers")
    specs = list(layers)
    specs[0] += 1
    specs[-1] += 1
    if 0 in specs:
        raise BalanceError(
            f"DeepSpeed needs a layer in every stage, stage {specs.index(0)} of this plan is empty: use fewer stages"
        )
    return (0, *accumulate(specs))


def deepspeed_class(parts: Sequence[int]) -> str:
    """Python source of a ``PipelineModule`` that is cut at ``parts``.

    ``partition_method`` knows rules (uniform, parameters, type:NAME), no indices, so the method that applies them is replaced.
    Source: ``deepspeed/runtime/pipe/module.py``, where that method sets ``self.parts`` and this rank's bounds.
    """
    num_specs, stages = parts[-1], len(parts) - 1
    return f'''\
from deepspeed.pipe import PipelineModule


class BalancedPipelineModule(PipelineModule):
    """{num_specs} layer specs on {stages} stages; stage s has specs PARTS[s] to PARTS[s + 1] - 1.

    Assumed specs: 0 is the embedding, 1 to {num_specs - 2} are the transformer layers, {num_specs - 1} is the head (final
    norm, output layer, loss). If your list has more (a reshape, a norm apart), move the indices along.
    """

    PARTS = {list(parts)}

    def _partition_layers(self, method="uniform"):
        stages, specs = self._topo.get_dim("pipe"), len(self._layer_specs)
        if (stages, specs) != (len(self.PARTS) - 1, self.PARTS[-1]):
            raise ValueError(f"planned for {stages} stages of {num_specs} specs, not {{stages}} of {{specs}}")
        self.parts = list(self.PARTS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''
