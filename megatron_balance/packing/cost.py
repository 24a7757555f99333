"""What a packed sequence costs: linear in its tokens, and by the pairs that attention looks at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIXED, VARIABLE = "fixed", "variable"  # shapes of micro-batches: padded to the bin's capacity, or of true length
SHAPES = (FIXED, VARIABLE)
_BACKWARD = 2.0  # backward over forward seconds where only a ratio is known


@dataclass(frozen=True)
class SequenceCost:
    """Seconds that all stages together take for one sequence of s tokens: ``linear * s + sum(quadratic_w * pairs_w(s))``.

    ``pairs_w(s)`` is s^2 for a sequence within the window w, and ``2 * w * s - w**2`` beyond: twice the area that causal
    attention of window w looks at.

    Attributes:
        linear: forward and backward seconds for each token.
        quadratic: of each window, (window, forward seconds, backward seconds for each pair); window None is full attention.
    """

    linear: tuple[float, float]
    quadratic: tuple[tuple[int | None, float, float], ...]

    @classmethod
    def of_ratio(cls, ratio: float) -> SequenceCost:
        """``ratio * s + s**2``, a third of it forward."""
        share = np.array([1.0, _BACKWARD]) / (1.0 + _BACKWARD)
        return cls(tuple(ratio * share), ((None, *share),))

    def attention_s(self, tokens: np.ndarray) -> np.ndarray:
        """Forward and backward seconds of attention, shape [2, sequences]."""
        tokens = np.asarray(tokens, dtype=np.float64)
        seconds = np.zeros((2, tokens.size))
        for window, forward_s, backward_s in self.quadratic:
            within = tokens if window is None else np.minimum(tokens, window)
            pairs = within * (2 * tokens - within)
            seconds += np.outer((forward_s, backward_s), pairs)
        return seconds

    def linear_s(self, tokens: np.ndarray) -> np.ndarray:
        """Forward and backward seconds of all but attention, shape [2, sequences]."""
        return np.outer(self.linear, tokens)


@dataclass(frozen=True)
class BinCost:
    """The same for a bin: ``empty_s`` and ``piece_s`` of each of its pieces.

    With fixed shapes padding is computed too, all but its attention: the linear part belongs to the bin, whatever it holds.
    """

    sequence: SequenceCost
    seq_length: int
    shapes: str = FIXED

    @property
    def empty_s(self) -> np.ndarray:
        """Forward and backward seconds of a bin besides its pieces, shape [2]."""
        return self.sequence.linear_s(np.array([self.seq_length if self.shapes == FIXED else 0]))[:, 0]

    def piece_s(self, tokens: np.ndarray) -> np.ndarray:
        """Forward and backward seconds that each piece adds to its bin, shape [2, pieces]."""
        seconds = self.sequence.attention_s(tokens)
        return seconds if self.shapes == FIXED else seconds + self.sequence.linear_s(tokens)
