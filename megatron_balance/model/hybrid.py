"""Layer patterns of hybrid (Mamba) models: a letter a layer, ``|`` between stages, ``/`` before multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_balance.errors import BalanceError
from megatron_balance.model.kinds import LayerKind

# Each layer of a hybrid model is one part of a transformer layer, under a norm and a residual of its own.
_ATTENTION = LayerKind(feed_forward=None)
_LETTERS = {
    "M": LayerKind(mixer="mamba", feed_forward=None),
    "*": _ATTENTION,
    "+": _ATTENTION,  # multi-latent
    "-": LayerKind(mixer=None),
    "E": LayerKind(mixer=None, moe=True),
}
_WITHOUT_COSTS = {"G": "a gated delta net", "D": "sparse latent attention (DSA)"}


@dataclass(frozen=True)
class HybridPattern:
    """A pattern of Megatron's ``--hybrid-layer-pattern``.

    Attributes:
        stages: letters of the layers of each stage; a single entry where the pattern has no borders.
        mtp: letters of the layers of one multi-token-prediction depth; empty without it.
        mtp_num_layers: those depths.
    """

    stages: tuple[str, ...]
    mtp: str = ""
    mtp_num_layers: int = 0

    @classmethod
    def parse(cls, text: str) -> HybridPattern:
        """Read a pattern as ``MM*-|MM*-/*-``.

        Raises:
            BalanceError: a letter is unknown or has no costs, there is no layer, or the depths differ.
        """
        main, *depths = text.split("/")
        depths = [depth for depth in depths if depth]
        pattern = cls(tuple(main.split("|")), depths[0] if depths else "", len(depths))
        for letter in pattern.letters + "".join(depths):
            _check(letter, text)
        if not pattern.letters:
            raise BalanceError(
                f"hybrid_layer_pattern {text!r} has no layers: give at least one of {' '.join(_LETTERS)}"
            )
        if {"*", "+"} <= {*text}:
            raise BalanceError(f"hybrid_layer_pattern {text!r} has attention of both kinds, * and +: write one of them")
        if len({*depths}) > 1:
            raise BalanceError(f"hybrid_layer_pattern {text!r} has prediction depths that differ: write them all alike")
        return pattern

    @property
    def letters(self) -> str:
        """Letters of all layers."""
        return "".join(self.stages)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        return tuple(_LETTERS[letter] for letter in self.letters)

    @property
    def mtp_layers(self) -> tuple[LayerKind, ...]:
        """Layers of one depth."""
        return tuple(_LETTERS[letter] for letter in self.mtp)

    def split(self, layers: Sequence[int]) -> HybridPattern:
        """The same model with the first stage of ``layers[0]`` layers, the next of ``layers[1]`` ...

        Raises:
            BalanceError: these are not the layers of the pattern.
        """
        if sum(layers) != len(self.letters):
            raise BalanceError(f"stages of {sum(layers)} layers cannot split a pattern of {len(self.letters)}")
        ends = [sum(layers[: stage + 1]) for stage in range(len(layers))]
        stages = tuple(self.letters[end - count : end] for end, count in zip(ends, layers, strict=True))
        return HybridPattern(stages, self.mtp, self.mtp_num_layers)

    def __str__(self) -> str:
        """As ``--hybrid-layer-pattern`` takes it."""
        return "|".join(self.stages) + f"/{self.mtp}" * self.mtp_num_layers


def _check(letter: str, pattern: str) -> None:
    if letter in _WITHOUT_COSTS:
        raise BalanceError(
            f"the cost of {_WITHOUT_COSTS[letter]} is not known ({letter} in hybrid_layer_pattern {pattern!r}): mark the"
            " stages with | yourself"
        )
    if letter not in _LETTERS:
        raise BalanceError(f"hybrid_layer_pattern {pattern!r} holds {letter!r}, none of {' '.join(_LETTERS)} | /")
