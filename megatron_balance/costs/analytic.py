"""Costs of the chain from its shapes: every operation as a matrix product or as bytes moved, on a roofline.

What is counted is what Megatron runs for one micro-batch on one rank. Not counted: communication (tensor, context and
expert parallel), dropout, and what happens once a step (gradient synchronisation, optimizer), a tied head's included.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_balance import __version__
from megatron_balance.costs.chain import ElementCost
from megatron_balance.costs.devices import Device
from megatron_balance.costs.operations import Operations
from megatron_balance.costs.parameters import chain_parameters, layer_parameters
from megatron_balance.costs.table import CostTable, ElementRow, LayerRow, LengthRow, lengths_to_cost, shapes_of
from megatron_balance.model import LayerKind, ModelSpec
from megatron_balance.topology import Topology


def analytic_table(model: ModelSpec, topology: Topology, device: Device) -> CostTable:
    """Costs of one micro-batch on one rank of ``topology``, by kind of element, as a costs file holds them.

    What follows the pipeline once a step is not estimated.

    Raises:
        BalanceError: the device has no matrix products in the model's precision.
    """
    operations = Operations(model, topology)
    parameters = chain_parameters(model, topology)
    return CostTable(
        kind="analytic",
        device=device.name,
        embedding=_element(operations.embedding().cost(device), parameters.embedding.total),
        layers={str(kind): _layer(model, topology, device, kind) for kind in dict.fromkeys(model.layers)},
        head=_element(operations.head().cost(device), parameters.head.total),
        mtp=_element(operations.mtp().cost(device), parameters.mtp.total) if model.mtp_num_layers else None,
        update_s_per_parameter=None,
        holds_for=shapes_of(model, topology),
        provenance={},
        created_by=f"megatron_balance {__version__}",
    )


def _element(cost: ElementCost, parameters: int) -> ElementRow:
    return ElementRow(cost.forward_s, cost.backward_s, None, None, parameters)


def _layer(model: ModelSpec, topology: Topology, device: Device, kind: LayerKind) -> LayerRow:
    lengths = lengths_to_cost(model.seq_length, topology)
    costs = [
        Operations(replace(model, seq_length=length), topology).recomputed_layer(kind).cost(device)
        for length in lengths
    ]
    return LayerRow.of(
        _element(costs[-1], layer_parameters(model, topology, kind).total),
        [LengthRow(length, cost.forward_s, cost.backward_s) for length, cost in zip(lengths, costs, strict=True)],
        topology.micro_batch_size,
    )
