"""What a job's parallel sizes ask of its packed batches."""

from __future__ import annotations

import math

from megatron_balance.errors import BalanceError
from megatron_balance.packing.grid import Grid
from megatron_balance.topology import Topology


def alignment_of(topology: Topology) -> int:
    """Tokens of which each piece takes a multiple in its bin.

    Context parallelism gives each of its ranks two equal parts of every sequence, as in Megatron's and Transformer Engine's
    packed ("thd") format. Sequence parallelism cuts bins, not pieces.
    """
    return 2 * topology.context_size if topology.context_size > 1 else 1


def check_seq_length(seq_length: int, topology: Topology, sequence_parallel: bool) -> None:
    """Refuse bins that the ranks cannot share.

    Raises:
        BalanceError: tensor or context parallelism does not divide them.
    """
    context, tensor = topology.context_size, topology.tensor_size if sequence_parallel else 1
    step = alignment_of(topology) * tensor
    if seq_length % step:
        by = " and ".join(
            name
            for name, given in (
                (f"2 * --context-parallel-size {context}", context > 1),
                (f"--tensor-model-parallel-size {tensor} with --sequence-parallel", tensor > 1),
            )
            if given
        )
        raise BalanceError(
            f"--seq-length {seq_length} is not a multiple of {step} ({by}): use {max(seq_length // step, 1) * step}"
        )


def grid_of(topology: Topology, expert_size: int = 1, expert_tensor_size: int | None = None) -> Grid:
    """The bins of a job, with the data-parallel ranks that share experts.

    Args:
        topology: sizes of the job.
        expert_size: ``--expert-model-parallel-size``.
        expert_tensor_size: ``--expert-tensor-parallel-size``; None is the tensor-parallel size, as in Megatron.

    Raises:
        BalanceError: experts are spread over ranks that are not there.
    """
    shards = expert_size * (expert_tensor_size or topology.tensor_size)
    replica = topology.tensor_size * topology.context_size
    together = math.lcm(shards, replica) // replica
    if topology.data_size % together:
        raise BalanceError(
            f"experts on {shards} ranks (expert parallel {expert_size} * expert tensor parallel {shards // expert_size}) do not"
            f" fit {topology.data_size} data-parallel ranks of {replica} (tensor * context parallel): change"
            " --expert-model-parallel-size or the number of processes"
        )
    return Grid(topology, together)
