"""Matrix FLOPs of the operations that costs stand on: forward, for one micro-batch on one rank."""

from __future__ import annotations

from megatron_balance.costs.operations import Operations, Work
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology


def layer_flops(model: ModelSpec, topology: Topology, layer: int) -> float:
    """Of layer number ``layer``."""
    return _forward(Operations(model, topology).layer(model.layers[layer]))


def head_flops(model: ModelSpec, topology: Topology) -> float:
    """Of the output layer, once more for each prediction depth."""
    return _forward(Operations(model, topology).head())


def model_flops(model: ModelSpec, topology: Topology) -> float:
    """Of all layers, prediction depths and output layers."""
    layers = sum(layer_flops(model, topology, layer) for layer in range(model.num_layers))
    return layers + _forward(Operations(model, topology).mtp()) + head_flops(model, topology)


def _forward(work: Work) -> float:
    return sum(kernel.flops for kernel in work.forward)
