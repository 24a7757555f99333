"""How long the activations of a micro-batch travel from one pipeline stage to the next."""

from __future__ import annotations

from megatron_balance.costs.activations import Activations
from megatron_balance.costs.devices import Device
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology


def transfer_bytes(model: ModelSpec, topology: Topology) -> float:
    """What one rank sends to the next stage for a micro-batch; the gradient that comes back has the same size.

    The residual stream of its tokens, ``[sequence / CP, micro-batch size, hidden]``, in the model's dtype. Each tensor-parallel
    rank sends all of it, with sequence parallelism its share (``tensor_shape`` in Megatron's ``schedules.py``).
    """
    return Activations(model, topology).residual


def transfer_s(model: ModelSpec, topology: Topology, device: Device) -> float:
    """Seconds of a transfer between pipeline stages, by ``device``'s link: its latency, and bytes over bandwidth."""
    return device.link.seconds(transfer_bytes(model, topology))
