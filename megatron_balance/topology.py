"""How a job's processes are laid out: the sizes that a schedule and a cost depend on."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.errors import BalanceError


def virtual_size_of(layers: int, pipeline_size: int, layers_each: int) -> int:
    """Virtual stages on each rank that come nearest to ``layers_each`` layers (``--num-layers-per-virtual-pipeline-stage``)."""
    return max(1, round(layers / (pipeline_size * layers_each)))


@dataclass(frozen=True)
class Topology:
    """Parallel sizes and the batch of one training step.

    A *stage* is one model chunk of one pipeline rank. There are ``pipeline_size * virtual_size`` of them; stage
    ``chunk * pipeline_size + rank`` is chunk ``chunk`` of pipeline rank ``rank``, and data passes the stages in order.
    This is also the order of Megatron's layout string.

    Attributes:
        pipeline_size: pipeline ranks (PP).
        num_microbatches: micro-batches that each pipeline runs in one step (M).
        virtual_size: model chunks on each rank (V, Megatron's virtual pipeline size; 1 without interleaving).
        micro_batch_size: sequences in a micro-batch.
        tensor_size, context_size, data_size: TP, CP and DP sizes.
        microbatch_group_size: micro-batches that a chunk runs before the next chunk takes over (interleaved schedule
            only; None is Megatron's default, ``pipeline_size``).
        overlap_moe: the forward pass of one micro-batch and the backward pass of another run as one, to hide their
            expert-parallel communication (``--overlap-moe-expert-parallel-comm``); needs virtual stages on several ranks.
    """

    pipeline_size: int
    num_microbatches: int
    virtual_size: int = 1
    micro_batch_size: int = 1
    tensor_size: int = 1
    context_size: int = 1
    data_size: int = 1
    microbatch_group_size: int | None = None
    overlap_moe: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, bool) and value < 1:
                raise BalanceError(f"{name} must be at least 1, not {value}")

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.virtual_size

    @property
    def group_size(self) -> int:
        """Micro-batches per group of the interleaved schedule."""
        return self.microbatch_group_size or self.pipeline_size
