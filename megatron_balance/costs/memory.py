"""What the elements of a model occupy in a rank's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ElementMemory:
    """Bytes that one element takes on one rank.

    Attributes:
        state_bytes: parameters, gradients and optimizer state; always there.
        activation_bytes: what its forward pass keeps for its backward pass, for each micro-batch in flight.
        working_bytes: what comes on top while it runs, once however many micro-batches are in flight: the logits'
            gradient, a layer computed again.
    """

    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    working_bytes: float = 0.0

    @classmethod
    def together(cls, elements: Iterable[ElementMemory]) -> ElementMemory:
        """Elements of one stage, of which one runs at a time."""
        elements = list(elements)
        return cls(
            sum(element.state_bytes for element in elements),
            sum(element.activation_bytes for element in elements),
            max((element.working_bytes for element in elements), default=0.0),
        )


@dataclass(frozen=True)
class ChainMemory:
    """The same along the chain; elements as in ``ChainCosts``."""

    embedding: ElementMemory
    layers: tuple[ElementMemory, ...]
    mtp: ElementMemory
    head: ElementMemory
