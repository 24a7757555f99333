"""The bins of a global batch as Megatron's sampler numbers them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class Grid:
    """Where the bins of one global batch are run.

    Bin ``(k * DP + r) * micro_batch_size + j`` is sequence j of micro-batch k of data-parallel rank r: the item that stock
    Megatron's sampler takes for it.

    Attributes:
        topology: pipeline, data-parallel size, micro-batches and their size.
        lockstep_size: data-parallel ranks in a row that wait for one another in every micro-batch, because their experts are
            shared (EP * ETP / (TP * CP), at least 1); divides the data-parallel size.
    """

    topology: Topology
    lockstep_size: int = 1

    @property
    def num_bins(self) -> int:
        topology = self.topology
        return topology.data_size * topology.num_microbatches * topology.micro_batch_size

    def check_filled_by(self, pieces: int) -> None:
        """Refuse fewer pieces than bins.

        Raises:
            BalanceError: a bin would be empty.
        """
        if pieces < self.num_bins:
            raise BalanceError(
                f"{pieces} pieces of documents cannot fill {self.num_bins} bins: lower --global-batch-size"
            )
