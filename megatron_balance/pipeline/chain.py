"""What the stages of a split cost, and which splits there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.errors import BalanceError


def stage_costs(costs: ChainCosts, layers: Sequence[int], mtp_stage: int | None = None) -> tuple[ElementCost, ...]:
    """Cost of each stage, with the embedding in the first and the head in the last.

    Args:
        costs: of the elements.
        layers: number of layers of each stage; they add up to ``len(costs.layers)``.
        mtp_stage: stage of multi-token prediction; None is the last.
    """
    stops = np.cumsum(layers)
    before = prefix_costs(costs)
    seconds = before[:, stops] - before[:, stops - layers] + end_costs(costs, len(layers), mtp_stage)
    updates = prefix_updates(costs)
    update = updates[stops] - updates[stops - layers] + end_updates(costs, len(layers), mtp_stage)
    return tuple(ElementCost(*map(float, stage)) for stage in zip(*seconds, update, strict=True))


def prefix_costs(costs: ChainCosts) -> np.ndarray:
    """Forward and backward seconds of the first 0, 1, ..., n layers, shape [2, n + 1]."""
    seconds = [(layer.forward_s, layer.backward_s) for layer in costs.layers]
    return np.concatenate([np.zeros((2, 1)), np.cumsum(seconds, axis=0).T], axis=1)


def prefix_updates(costs: ChainCosts) -> np.ndarray:
    """Seconds, once a step, that the first 0, 1, ..., n layers take to update, shape [n + 1]."""
    return np.cumsum([0.0, *(layer.update_s for layer in costs.layers)])


def end_costs(costs: ChainCosts, num_stages: int, mtp_stage: int | None = None) -> np.ndarray:
    """Forward and backward seconds that embedding, multi-token prediction and head add to the stages, shape [2, stages]."""
    seconds = np.zeros((2, num_stages))
    for stage, element in _ends(costs, mtp_stage):
        seconds[:, stage] += element.forward_s, element.backward_s
    return seconds


def end_updates(costs: ChainCosts, num_stages: int, mtp_stage: int | None = None) -> np.ndarray:
    """Seconds, once a step, that the same elements add to the stages' updates, shape [stages]."""
    seconds = np.zeros(num_stages)
    for stage, element in _ends(costs, mtp_stage):
        seconds[stage] += element.update_s
    return seconds


def _ends(costs: ChainCosts, mtp_stage: int | None) -> tuple[tuple[int, ElementCost], ...]:
    return (0, costs.embedding), (-1 if mtp_stage is None else mtp_stage, costs.mtp), (-1, costs.head)


def layer_limits(
    num_layers: int, num_stages: int, mtp_stage: int | None = None, allow_empty: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Layers that each stage holds at least and at most, int64 of shape [stages].

    At least one, but none beside embedding, head, and multi-token prediction in ``mtp_stage`` (None: in the last). At
    most all, but none behind multi-token prediction: Megatron wants every layer before it.
    """
    place = num_stages - 1 if mtp_stage is None else mtp_stage
    least, most = np.ones(num_stages, dtype=np.int64), np.full(num_stages, num_layers)
    least[[0, place, -1]] = 0
    most[place + 1 :] = 0
    return least * (not allow_empty), most


def check_stages(num_layers: int, num_stages: int) -> None:
    """Refuse more stages than elements.

    Raises:
        BalanceError: some stage would stay empty.
    """
    empty = num_stages - (num_layers + 2)
    if empty > 0:
        raise BalanceError(
            f"{num_layers} layers, embedding and head are {num_layers + 2} elements; {num_stages} stages would leave "
            f"{empty} empty: use at most {num_layers + 2} stages (pipeline ranks times virtual stages on each rank)"
        )


def uniform_layers(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Megatron's split without any flag; None where it refuses the layer count."""
    return (num_layers // num_stages,) * num_stages if num_layers % num_stages == 0 else None
