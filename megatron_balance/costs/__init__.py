"""What each element of the model costs on one rank."""

from megatron_balance.costs.chain import ChainCosts, ElementCost

__all__ = ["ChainCosts", "ElementCost"]
