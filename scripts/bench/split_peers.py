"""Rules by which other frameworks split a model, each written from its description, on a chain of n equal layers.

Every rule returns the layers of each stage, or None where it refuses. Weights are in layers.
"""

from __future__ import annotations

import numpy as np

Layers = tuple[int, ...]


def even(num_layers: int, stages: int) -> Layers | None:
    """Megatron's own: equal stages, or embedding and loss counted as exactly a layer each where only that divides."""
    if num_layers % stages == 0:
        return (num_layers // stages,) * stages
    return embedding_and_loss(num_layers, stages)


def embedding_and_loss(num_layers: int, stages: int) -> Layers | None:
    """Megatron's flags that count embedding and loss as exactly a layer each."""
    level, remainder = divmod(num_layers + 2, stages)
    return None if remainder else (level - 1, *(level,) * (stages - 2), level - 1)


def torchtitan(num_layers: int, stages: int, output_weight: int) -> Layers | None:
    """Whole weights: the embedding's 1, the head's ``output_weight``; what does not divide goes to the first stages.

    Refuses where a weight is larger than a stage.
    """
    level, remainder = divmod(num_layers + 1 + output_weight, stages)
    if level < output_weight:
        return None
    layers = [level + (stage < remainder) for stage in range(stages)]
    layers[0] -= 1
    layers[-1] -= output_weight
    return tuple(layers)


def deepspeed(num_layers: int, stages: int, layer: float, table: float) -> Layers:
    """The split of all modules with the smallest largest minus smallest stage, counted in parameters.

    Dynamic programming keeps one split for each (modules, stages), the last where several are equal.

    Args:
        layer, table: parameters of a layer, and of embedding and head each.
    """
    before = np.cumsum([0.0, table, *(layer,) * num_layers, table])
    best = {(0, 0): (0.0, 0.0, np.inf, ())}  # spread, largest, smallest, stops
    for count in range(1, stages + 1):
        for stop in range(count, before.size):
            splits = [
                _with_stage(best[start, count - 1], before[stop] - before[start], stop)
                for start in range(count - 1, stop)
                if (start, count - 1) in best
            ]
            best[stop, count] = min(reversed(splits), key=lambda split: split[0])
    return _without_ends(np.diff(best[before.size - 1, stages][3], prepend=0))


def _with_stage(split: tuple[float, float, float, Layers], weight: float, stop: int) -> tuple:
    _, largest, smallest, stops = split
    largest, smallest = max(largest, weight), min(smallest, weight)
    return largest - smallest, largest, smallest, (*stops, stop)


def _without_ends(modules: np.ndarray) -> Layers:
    modules[0] -= 1
    modules[-1] -= 1
    return tuple(modules.tolist())


def nanotron(num_layers: int, stages: int, layer_cost: float, head_cost: float) -> Layers:
    """Modules in turn; a stage ends with the module that takes the running sum past its share of the total.

    Where that leaves the last stage empty, the head's stage is moved to the end, as Megatron has it there.
    """
    running = np.cumsum([0.0, *(layer_cost,) * num_layers, head_cost])
    modules, stage = np.zeros(stages, dtype=int), 0
    for cost in running:
        modules[stage] += 1
        if cost > running[-1] * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    head = np.flatnonzero(modules)[-1]
    modules[[head, -1]] = modules[[-1, head]]
    return _without_ends(modules)


def smallest_maximum(num_layers: int, stages: int, head: float) -> Layers:
    """The split with the smallest largest stage, filled from the back, so that the early stages are the light ones."""

    def filled(cap: float) -> Layers | None:
        last = min(int(cap - head + 1e-9), num_layers) if cap >= head else -1
        layers, left = [last], num_layers - last
        for stage in range(stages - 2, -1, -1):
            layers.append(min(int(cap + 1e-9), left - (stage - 1 if stage > 1 else 0)))
            left -= layers[-1]
        return tuple(reversed(layers)) if last >= 0 and left == 0 else None

    caps = sorted([*range(1, num_layers + 1), *(head + last for last in range(num_layers))])
    return next(filter(None, map(filled, caps)))
