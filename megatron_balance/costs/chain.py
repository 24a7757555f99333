"""Costs along the chain embedding, layers, head: the common currency of analytic and measured costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_balance.errors import BalanceError


@dataclass(frozen=True)
class ElementCost:
    """Time that one element takes on one rank, in seconds.

    Attributes:
        forward_s: of one micro-batch.
        backward_s: of one micro-batch, with what is repeated for each after it: recomputation, and adding the weights'
            gradients to the main gradients.
        update_s: once a step, after all micro-batches: its parameters' part of gradient norm and optimizer.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise BalanceError(f"{name} must be a time of zero or more seconds, not {value}")

    @property
    def total_s(self) -> float:
        """Of one micro-batch, both ways."""
        return self.forward_s + self.backward_s

    def __add__(self, other: ElementCost) -> ElementCost:
        return ElementCost(
            self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.update_s + other.update_s
        )

    def __mul__(self, times: float) -> ElementCost:
        return ElementCost(self.forward_s * times, self.backward_s * times, self.update_s * times)


@dataclass(frozen=True)
class ChainCosts:
    """Costs of the elements that a pipeline split deals out.

    Attributes:
        embedding: word (and position) embedding; always in the first stage.
        layers: transformer layers, in model order.
        head: final norm, output layer and loss, the latter two once more for each multi-token-prediction depth; always in
            the last stage.
        source: where the figures come from, shown to the user ("analytic (H100)", a file's name).
        mtp: the multi-token-prediction layers of all depths (embedding look-up, norms, projection, layer) without output
            layer and loss; in one stage, behind all layers. Nothing where there are none or their cost is in ``head``.
    """

    embedding: ElementCost
    layers: tuple[ElementCost, ...]
    head: ElementCost
    source: str
    mtp: ElementCost = ElementCost(0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.layers:
            raise BalanceError("a model without transformer layers cannot be split: give --num-layers 1 or more")
        if not (self.mean_layer.forward_s > 0 and self.mean_layer.backward_s > 0):
            raise BalanceError("the transformer layers cost nothing: the costs cannot be right")

    @property
    def mean_layer(self) -> ElementCost:
        # Rounded once: `sum` adds up in another way from Python 3.12 on, and a last digit can lead the search elsewhere.
        count = len(self.layers)
        return ElementCost(
            math.fsum(layer.forward_s for layer in self.layers) / count,
            math.fsum(layer.backward_s for layer in self.layers) / count,
            math.fsum(layer.update_s for layer in self.layers) / count,
        )

    @property
    def total(self) -> ElementCost:
        """The whole model."""
        return self.embedding + self.mean_layer * len(self.layers) + self.mtp + self.head

    def in_layers(self, element: ElementCost) -> tuple[float, float]:
        """Forward and backward cost of ``element`` in units of the mean layer's."""
        mean = self.mean_layer
        return element.forward_s / mean.forward_s, element.backward_s / mean.backward_s

    def from_layers(self, forward: float, backward: float, update_s: float = 0.0) -> ElementCost:
        """The cost of ``forward`` and ``backward`` mean layers, with the update time given."""
        mean = self.mean_layer
        return ElementCost(forward * mean.forward_s, backward * mean.backward_s, update_s)

    def with_weights(
        self,
        embedding: tuple[float, float] | None = None,
        head: tuple[float, float] | None = None,
    ) -> ChainCosts:
        """These costs with the embedding or head replaced by the (forward, backward) weights given, in layers."""
        changes = {
            name: self.from_layers(*weights, getattr(self, name).update_s)
            for name, weights in (("embedding", embedding), ("head", head))
            if weights is not None
        }
        if not changes:
            return self
        return replace(self, **changes, source=f"{self.source}, {' and '.join(changes)} weight given")
