"""What a packed sequence costs: linear in its tokens, and by the pairs that attention looks at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_balance.errors import BalanceError

if TYPE_CHECKING:
    from megatron_balance.costs.devices import Device
    from megatron_balance.costs.table import CostTable
    from megatron_balance.model import LayerKind, ModelSpec
    from megatron_balance.topology import Topology

FIXED, VARIABLE = "fixed", "variable"  # shapes of micro-batches: padded to the bin's capacity, or of true length
SHAPES = (FIXED, VARIABLE)
_LEAST_S = 1e-30  # divides nothing by zero
_BACKWARD = 2.0  # backward over forward seconds where only a ratio is known


@dataclass(frozen=True)
class SequenceCost:
    """Seconds that all stages together take for one sequence of s tokens: ``linear * s + sum(quadratic_w * pairs_w(s))``.

    ``pairs_w(s)`` is s^2 for a sequence within the window w, and ``2 * w * s - w**2`` beyond: twice the area that causal
    attention of window w looks at. The window counts all keys that a query sees, its own included.

    Attributes:
        linear: forward and backward seconds for each token.
        quadratic: of each window, (window, forward seconds, backward seconds for each pair); window None is full attention.
    """

    linear: tuple[float, float]
    quadratic: tuple[tuple[int | None, float, float], ...]

    @classmethod
    def of_ratio(cls, ratio: float) -> SequenceCost:
        """``ratio * s + s**2``, a third of it forward."""
        forward, backward = 1.0 / (1.0 + _BACKWARD), _BACKWARD / (1.0 + _BACKWARD)
        return cls((ratio * forward, ratio * backward), ((None, forward, backward),))

    @classmethod
    def of_table(
        cls, table: CostTable, model: ModelSpec, topology: Topology, device: Device | None = None
    ) -> SequenceCost:
        """The cost of all stages of ``topology`` together, one rank of each, from costs by kind of layer.

        For a sequence of the model's own length it is what ``table`` says, with whatever does not grow with the sequence.
        What attention has of it is counted in operations (``device`` given) or fitted to the costs at several lengths; all
        else is linear, embedding and head too.

        Args:
            table: costs of ``model`` at ``model.seq_length`` tokens, as `analytic_table` makes or `load_fitting` reads them.
            model: the model.
            topology: sizes of the job; a tensor and context parallel size is in ``table`` already.
            device: of analytic costs; None for measured ones.

        Raises:
            BalanceError: the model has a kind of layer that ``table`` has not, or it is of a trace.
        """
        if not table.tells_attention:
            raise BalanceError(
                "costs of a trace do not tell what of a layer is attention, which packing needs: take measured or estimated ones"
            )
        whole = table.chain(model, topology).total
        whole_s = np.array([whole.forward_s, whole.backward_s]) / topology.micro_batch_size
        pair_s = _attention(table, model, topology, device)
        own = np.array([float(model.seq_length)])
        total_s = sum((seconds * _pairs(own, window) for window, seconds in pair_s.items()), np.zeros(2))
        share = np.minimum(1.0, whole_s / np.maximum(total_s, _LEAST_S))  # a noisy fit never exceeds the whole
        forward_s, backward_s = ((whole_s - share * total_s) / own).tolist()
        return cls(
            (forward_s, backward_s), tuple((window, *(share * each).tolist()) for window, each in pair_s.items())
        )

    def attention_s(self, tokens: np.ndarray) -> np.ndarray:
        """Forward and backward seconds of attention, shape [2, sequences]."""
        tokens = np.asarray(tokens, dtype=np.float64)
        seconds = np.zeros((2, tokens.size))
        for window, forward_s, backward_s in self.quadratic:
            seconds += np.outer((forward_s, backward_s), _pairs(tokens, window))
        return seconds

    def linear_s(self, tokens: np.ndarray) -> np.ndarray:
        """Forward and backward seconds of all but attention, shape [2, sequences]."""
        return np.outer(self.linear, tokens)


@dataclass(frozen=True)
class BinCost:
    """Seconds that all stages together take for a bin: ``empty_s``, and ``piece_s`` of each of its pieces.

    With fixed shapes padding is computed too, all but its attention: the linear part belongs to the bin, whatever it holds.

    Attributes:
        sequence: cost of a sequence by its length.
        seq_length: tokens of a bin.
        shapes: of micro-batches, ``fixed`` or ``variable``.
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


def _attention(
    table: CostTable, model: ModelSpec, topology: Topology, device: Device | None
) -> dict[int | None, np.ndarray]:
    """By window, forward and backward seconds of all layers for each pair, shape [2]; the widest window last."""
    recomputed = model.recompute.full_share(model.num_layers, topology.num_stages)
    depths = model.depth_layers * model.mtp_num_layers if table.mtp else ()
    layers = Counter(kind for kind in (*model.layers, *depths) if kind.mixer == "attention")
    if device is None:
        each = _fitted(table, model, topology, recomputed, layers)
    else:
        each = {kind: _counted(model, topology, device, recomputed, kind) for kind in layers}
    pair_s: dict[int | None, np.ndarray] = {}
    for kind in sorted(layers, key=lambda kind: _width(_window(kind, model))):
        window = _window(kind, model)
        pair_s[window] = pair_s.get(window, np.zeros(2)) + layers[kind] * each[kind]
    return pair_s


def _counted(model: ModelSpec, topology: Topology, device: Device, recomputed: float, kind: LayerKind) -> np.ndarray:
    """Seconds of one layer for each pair, from its operations at the model's own length, their launch left out."""
    from megatron_balance.costs.operations import Operations

    work = Operations(model, topology).recomputed_attention(kind)
    again = (1.0 - recomputed) * (model.recompute.granularity == "full")
    launched = replace(device, kernel_s=0.0)
    forward_s, backward_s = launched.seconds(work.forward), launched.seconds(work.backward)
    pairs = _pairs(np.array([float(model.seq_length)]), _window(kind, model)) * topology.micro_batch_size
    return np.array([forward_s, backward_s - again * forward_s]) / pairs


def _fitted(
    table: CostTable, model: ModelSpec, topology: Topology, recomputed: float, kinds: Iterable[LayerKind]
) -> dict[LayerKind, np.ndarray]:
    """Seconds of one layer for each pair, fitted to ``table``'s costs at several lengths.

    Where all lengths are beyond a window, cost is linear and tells nothing of it: a pair then costs what it does in the layers
    with the widest window.
    """
    again = (1.0 - recomputed) * (table.holds_for.get("recompute_granularity") == "full")
    found, widest = {}, np.zeros(2)
    for kind in sorted(kinds, key=lambda kind: _width(_window(kind, model)), reverse=True):
        rows, window = table.layer(str(kind)).by_length, _window(kind, model)
        if len(rows) > 1 and rows[0].seq_length < _width(window):
            lengths = np.array([row.seq_length for row in rows], dtype=np.float64)
            forward_s = np.array([row.forward_s for row in rows])
            backward_s = np.array([row.backward_s for row in rows]) - again * forward_s
            found[kind] = np.array([_slope(lengths, seconds, window) for seconds in (forward_s, backward_s)])
            found[kind] /= topology.micro_batch_size
        else:
            found[kind] = widest
        widest = widest if widest.any() else found[kind]
    return found


def _slope(lengths: np.ndarray, seconds: np.ndarray, window: int | None) -> float:
    """Seconds for each pair where ``seconds`` are ``k + a * s + b * pairs(s)``, none of them negative; k needs 3 lengths."""
    from scipy.optimize import nnls

    columns = [lengths, _pairs(lengths, window)] + [np.ones(lengths.size)] * (lengths.size > 2)
    scales = np.array([column.max() for column in columns])
    relative = np.stack(columns, axis=1) / scales / np.maximum(seconds, _LEAST_S)[:, None]
    weights, _ = nnls(relative, np.ones(lengths.size))
    return float(weights[1] / scales[1])


def _window(kind: LayerKind, model: ModelSpec) -> int | None:
    """Keys that a query sees, its own included; local layers compute the whole square, whatever their window."""
    return kind.window + 1 if kind.window is not None and model.fused_kernels else None


def _width(window: int | None) -> float:
    return math.inf if window is None else window


def _pairs(tokens: np.ndarray, window: int | None) -> np.ndarray:
    """Twice the pairs of query and key that causal attention looks at, for sequences of so many tokens."""
    within = tokens if window is None else np.minimum(tokens, window)
    return within * (2 * tokens - within)
