"""Costs by kind of element, with their origin: what is measured, cached, written to a costs file and read from one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron_balance import reading
from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.errors import BalanceError
from megatron_balance.files import read_text, write_text
from megatron_balance.model import ModelSpec
from megatron_balance.reading import Scalar
from megatron_balance.topology import Topology

_FORMAT = "megatron-balance costs"
_FORMAT_VERSION = 2
_REMEDY = "measure anew (megatron-balance profile) or pass another"
_LOCAL = {"fused_kernels", "gradient_accumulation_fusion"}  # what alone differs of costs from the CPU runtime
_LOCAL_REMEDY = "they are of local layers, as on a CPU: add --transformer-impl local --no-gradient-accumulation-fusion"
DIAGNOSED = "diagnosed"  # from the trace of a job
_KINDS = ("analytic", "measured", DIAGNOSED)
ANY_LAYER = "any"  # in place of a kind of layer: what an average one costs


@dataclass(frozen=True)
class LengthRow:
    """Seconds of one layer for a micro-batch of sequences of ``seq_length`` tokens."""

    seq_length: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class ElementRow:
    """What one embedding, layer or head costs a rank.

    Attributes:
        forward_s, backward_s: seconds for one micro-batch, gradients added to the main gradients included.
        forward_spread, backward_spread: distance of the quartiles over the median; None where there are no samples.
        parameters: that one rank holds.
    """

    forward_s: float
    backward_s: float
    forward_spread: float | None
    backward_spread: float | None
    parameters: int


@dataclass(frozen=True)
class LayerRow(ElementRow):
    """What one transformer layer costs a rank.

    Attributes:
        by_length: the same at several sequence lengths, ascending.
        forward_fit, backward_fit: (a, b), such that a sequence of s tokens takes about ``a * s + b * s**2`` seconds.
    """

    by_length: tuple[LengthRow, ...]
    forward_fit: tuple[float, float]
    backward_fit: tuple[float, float]

    @classmethod
    def of(cls, costs: ElementRow, by_length: Sequence[LengthRow], micro_batch_size: int) -> LayerRow:
        """The costs at the model's own length with those at several, for micro-batches of so many sequences, and the fits."""
        lengths = [one.seq_length for one in by_length]
        return cls(
            **vars(costs),
            by_length=tuple(by_length),
            forward_fit=fit_length(lengths, [one.forward_s / micro_batch_size for one in by_length]),
            backward_fit=fit_length(lengths, [one.backward_s / micro_batch_size for one in by_length]),
        )


@dataclass(frozen=True)
class CostTable:
    """Costs of the elements of a model on one rank, whatever the number of layers and stages.

    Attributes:
        kind: ``analytic``, ``measured`` or ``diagnosed``.
        device: that the seconds are of.
        embedding: with fetching the batch, which its stage does.
        layers: by kind of layer, as ``LayerKind`` writes it, or for ``ANY_LAYER``, as in costs of a trace.
        head: final norm, output layer and loss, the latter two once more for each multi-token-prediction depth.
        update_s_per_parameter: seconds of a step outside its micro-batches (zeroing gradients, their norm, optimizer) for
            each parameter of a rank; None where they are not known.
        holds_for: names and values of the shapes and settings that the costs depend on.
        provenance: software versions, samples and whatever else tells how they came about.
        created_by: version of this package.
        mtp: the multi-token-prediction layers of all depths; None where there are none or they are in ``head``, as in costs
            that are measured.
    """

    kind: str
    device: str
    embedding: ElementRow
    layers: Mapping[str, LayerRow]
    head: ElementRow
    update_s_per_parameter: float | None
    holds_for: Mapping[str, Scalar]
    provenance: Mapping[str, Scalar]
    created_by: str
    mtp: ElementRow | None = None

    def chain(self, model: ModelSpec, topology: Topology) -> ChainCosts:
        """The costs along ``model``'s chain on the stages of ``topology``.

        Raises:
            BalanceError: the model has a kind of layer that is not here.
        """
        names = [str(kind) for kind in model.layers]
        recomputed = model.recompute.full_share(model.num_layers, topology.num_stages)
        layers = {name: self._layer(self.layer(name), recomputed) for name in dict.fromkeys(names)}
        return ChainCosts(
            embedding=self._element(self.embedding),
            layers=tuple(layers[name] for name in names),
            head=self._element(self.head),
            source=self.source,
            mtp=self._element(self.mtp) if self.mtp else ElementCost(0.0, 0.0),
        )

    @property
    def tells_attention(self) -> bool:
        """Whether what attention takes is known apart from the rest of a layer."""
        return self.kind != DIAGNOSED

    def layer(self, kind: str) -> LayerRow:
        """The costs of a kind of layer.

        Raises:
            BalanceError: it is not here, nor what an average layer costs.
        """
        if (row := self.layers.get(kind, self.layers.get(ANY_LAYER))) is None:
            raise BalanceError(f"the costs are of {', '.join(self.layers)} layers, but the model has {kind} ones too")
        return row

    @property
    def source(self) -> str:
        """Where the costs come from, in a few words."""
        return f"{self.kind} ({self.device})"

    def _element(self, costs: ElementRow) -> ElementCost:
        update_s = (self.update_s_per_parameter or 0.0) * costs.parameters
        return ElementCost(costs.forward_s, costs.backward_s, update_s)

    def _layer(self, costs: LayerRow, recomputed: float) -> ElementCost:
        """With full recomputation the backward seconds are those of a layer that is computed again; not all of them are."""
        spared_s = costs.forward_s * (1 - recomputed) if self.holds_for.get("recompute_granularity") == "full" else 0.0
        return replace(self._element(costs), backward_s=max(0.0, costs.backward_s - spared_s))

    def with_attention(self, share: float) -> CostTable:
        """The costs where attention, the quadratic part of each layer's fit, is only this share of what it is.

        Those of a trace stay: they are of sequences as the job packed them.

        Args:
            share: sum of the squared lengths of a packed sequence's documents over its own length squared.
        """
        if not self.tells_attention:
            return self
        sequences = float(self.holds_for["micro_batch_size"]) * (1.0 - share)
        return replace(self, layers={kind: _with_less(row, sequences) for kind, row in self.layers.items()})

    def check_fits(self, holds_for: Mapping[str, Scalar], name: str) -> None:
        """Refuse costs of another model; those of a trace hold for whatever they do not name.

        Raises:
            BalanceError: names what differs.
        """
        keys = sorted({*self.holds_for} if self.kind == DIAGNOSED else {*holds_for, *self.holds_for})
        differing = [key for key in keys if holds_for.get(key) != self.holds_for.get(key)]
        if differing:
            told = [f"{key} is {holds_for.get(key)!r} here, {self.holds_for.get(key)!r} there" for key in differing]
            local = self.holds_for.get("fused_kernels") is False and {*differing} <= _LOCAL
            raise BalanceError(f"{name} is of other shapes: {'; '.join(told)}; {_LOCAL_REMEDY if local else _REMEDY}")

    def to_json(self) -> str:
        """The text of a costs file."""
        head = {"format": _FORMAT, "format_version": _FORMAT_VERSION}
        return json.dumps({**head, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "the costs") -> CostTable:
        """Read what ``to_json`` wrote, or a tool of yours.

        Args:
            text: contents of a costs file, which may come from anywhere.
            name: what to call it in errors.

        Raises:
            BalanceError: this is not a whole, undamaged costs file; names the key.
        """
        try:
            return _read_table(reading.parse_object(text))
        except reading.DamageError as damage:
            raise BalanceError(f"{name} {damage}; {_REMEDY}") from damage


def _with_less(row: LayerRow, sequences: float) -> LayerRow:
    """``row`` without the attention over so many sequences of its own length."""
    own = row.by_length[-1].seq_length
    return replace(
        row,
        forward_s=max(0.0, row.forward_s - sequences * row.forward_fit[1] * own**2),
        backward_s=max(0.0, row.backward_s - sequences * row.backward_fit[1] * own**2),
    )


def shapes_of(model: ModelSpec, topology: Topology) -> dict[str, Scalar]:
    """What the costs of one micro-batch on one rank depend on: neither number of layers nor of stages."""
    shapes = {name: value for name, value in model.fingerprint.items() if name != "layers"}
    shapes["mtp_layers"] = " ".join(map(str, model.depth_layers))  # also where they repeat the last layer
    sizes = {name: getattr(topology, name) for name in ("micro_batch_size", "tensor_size", "context_size")}
    return {**shapes, **sizes}


def lengths_to_cost(own: int, topology: Topology) -> list[int]:
    """A quarter, a half and all of a sequence length, ascending, as far as the parallel sizes can divide them."""
    step = 2 * topology.tensor_size * topology.context_size
    return [length for length in (own // 4 // step * step, own // 2 // step * step) if 0 < length < own] + [own]


def fit_length(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b), neither negative, such that ``a * s + b * s**2`` comes nearest to the seconds, relative to each of them."""
    s, target = np.asarray(lengths, dtype=float), np.asarray(seconds, dtype=float)
    columns = np.stack([s, s**2], axis=1) / target[:, None]
    ones = np.ones(len(s))
    if len(s) > 1:
        (a, b), *_ = np.linalg.lstsq(columns, ones, rcond=None)
        if a >= 0 and b >= 0:
            return float(a), float(b)
    alone = [columns[:, i] @ ones / (columns[:, i] @ columns[:, i]) for i in (0, 1)]
    errors = [((alone[i] * columns[:, i] - 1) ** 2).sum() for i in (0, 1)]
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))


def load_costs(path: str | os.PathLike[str]) -> CostTable:
    """Read a costs file.

    Raises:
        BalanceError: it cannot be read, or is not a whole, undamaged costs file.
    """
    name = f"the costs file {path}"
    return CostTable.from_json(read_text(path, name), name)


def load_fitting(path: str | os.PathLike[str], model: ModelSpec, topology: Topology) -> CostTable:
    """Read a costs file for this model.

    Raises:
        BalanceError: as ``load_costs``, or its costs are of other shapes.
    """
    table = load_costs(path)
    table.check_fits(shapes_of(model, topology), f"the costs file {path}")
    return table


def save_costs(path: str | os.PathLike[str], table: CostTable) -> None:
    """Write a costs file; a reader finds the old file or the new one, never a part.

    Raises:
        BalanceError: the folder does not exist or cannot be written.
    """
    write_text(path, table.to_json(), f"the costs file {path}")


def _read_table(values: dict[str, Any]) -> CostTable:
    reading.check_format(values, _FORMAT, _FORMAT_VERSION, "a costs file")
    reading.check_keys(values, {*_READERS, "format", "format_version"})
    return CostTable(**{key: reader(values[key], key) for key, reader in _READERS.items()})


def _kind(value: Any, key: str) -> str:
    return reading.checked(value, key, value in _KINDS, f"one of {', '.join(_KINDS)}")


def _seconds(value: Any, key: str) -> float:
    """From a picosecond to days, or zero: beyond that sums and ratios of them fail."""
    number = reading.number(value, key)
    return reading.checked(number, key, number == 0 or 1e-12 <= number <= 1e6, "0 or 1e-12 to 1e6 seconds")


def _update(value: Any, key: str) -> float:
    number = reading.number(value, key)
    return reading.checked(number, key, number <= 1, "at most 1 second")


def _some_seconds(value: Any, key: str) -> float:
    return _seconds(reading.positive(value, key), key)


_ELEMENT: dict[str, reading.Reader] = {
    "forward_s": _seconds,
    "backward_s": _seconds,
    "forward_spread": reading.optional(reading.number),
    "backward_spread": reading.optional(reading.number),
    "parameters": reading.count,
}
_LENGTH: dict[str, reading.Reader] = {
    "seq_length": reading.count,
    "forward_s": _some_seconds,
    "backward_s": _some_seconds,
}


def _element(value: Any, key: str) -> ElementRow:
    return ElementRow(**reading.mapping(value, key, _ELEMENT))


def _by_length(value: Any, key: str) -> tuple[LengthRow, ...]:
    reading.checked(value, key, isinstance(value, list), "a list")
    points = tuple(LengthRow(**reading.mapping(each, f"{key}[{i}]", _LENGTH)) for i, each in enumerate(value))
    lengths = [point.seq_length for point in points]
    reading.checked(lengths, f"{key}.seq_length", lengths == sorted(set(lengths)), "ascending")
    return points


_LAYER: dict[str, reading.Reader] = {
    **_ELEMENT,
    "forward_s": _some_seconds,
    "backward_s": _some_seconds,
    "by_length": _by_length,
    "forward_fit": reading.pair,
    "backward_fit": reading.pair,
}


def _layers(value: Any, key: str) -> dict[str, LayerRow]:
    reading.checked(value, key, isinstance(value, dict) and bool(value), "a mapping of at least one kind of layer")
    return {kind: LayerRow(**reading.mapping(each, f"{key}.{kind}", _LAYER)) for kind, each in value.items()}


_READERS: dict[str, reading.Reader] = {
    "kind": _kind,
    "device": reading.text,
    "embedding": _element,
    "layers": _layers,
    "head": _element,
    "update_s_per_parameter": reading.optional(_update),
    "holds_for": reading.scalars,
    "provenance": reading.scalars,
    "created_by": reading.text,
    "mtp": reading.optional(_element),
}
