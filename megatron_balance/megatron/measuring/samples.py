"""What the clock saw, summed up: medians and spreads by element."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median, quantiles
from typing import Any

from megatron_balance import __version__
from megatron_balance.costs.table import CostTable, ElementRow, LayerRow, LengthRow
from megatron_balance.megatron.measuring.clock import PassTimes, splits_head
from megatron_balance.megatron.measuring.job import Shrunk
from megatron_balance.megatron.measuring.software import device_name, software


class Samples:
    """Times of micro-batches and steps of one measurement."""

    def __init__(self, shrunk: Shrunk, model: Any) -> None:
        """Start without samples.

        Args:
            shrunk: how the job was made small.
            model: the `GPTModel` that is measured, for its numbers of parameters.
        """
        self._shrunk = shrunk
        self._by_length: dict[int, list[PassTimes]] = {length: [] for length in sorted(set(shrunk.lengths))}
        self._outside_s: list[float] = []
        layers = [_parameters(layer) for layer in model.decoder.layers]
        self._total, embedding = _parameters(model), _parameters(model.embedding)
        self._has_mtp = splits_head(model)
        mtp = _parameters(model.mtp) if self._has_mtp else 0
        self._of_element = [embedding, *layers, self._total - embedding - sum(layers) - mtp]
        if self._has_mtp:
            self._of_element.append(mtp + embedding)  # its stage has a word embedding of its own

    def add(self, passes: Sequence[PassTimes], step_s: float) -> None:
        """Take in one step: its micro-batches in order, and the seconds of all of it."""
        for length, one in zip(self._shrunk.lengths, passes, strict=True):
            self._by_length[length].append(one)
        self._outside_s.append(step_s - sum(sum(one.forward_s) + sum(one.backward_s) for one in passes))

    def table(self) -> CostTable:
        """The costs."""
        full = self._by_length[max(self._by_length)]
        kinds = self._shrunk.layers
        return CostTable(
            kind="measured",
            device=device_name(),
            embedding=self._element(full, [0]),
            layers={
                str(kind): self._layer([i + 1 for i, own in enumerate(kinds) if own == kind])
                for kind in dict.fromkeys(kinds)
            },
            head=self._element(full, [len(kinds) + 1]),
            mtp=self._element(full, [len(kinds) + 2]) if self._has_mtp else None,
            update_s_per_parameter=median(self._outside_s) / self._total,
            holds_for=self._shrunk.holds_for(),
            provenance={**software(), "micro_batches": len(full), "steps": len(self._outside_s)},
            created_by=f"megatron_balance {__version__}",
        )

    def _element(self, passes: list[PassTimes], elements: list[int]) -> ElementRow:
        """Of a micro-batch the mean over elements that are alike, and over the micro-batches the median."""
        forward_s = [mean(one.forward_s[element] for element in elements) for one in passes]
        backward_s = [mean(one.backward_s[element] for element in elements) for one in passes]
        return ElementRow(
            median(forward_s),
            median(backward_s),
            _spread(forward_s),
            _spread(backward_s),
            parameters=self._of_element[elements[0]],
        )

    def _layer(self, elements: list[int]) -> LayerRow:
        by_length = {length: self._element(passes, elements) for length, passes in self._by_length.items()}
        return LayerRow.of(
            by_length[max(by_length)],
            [LengthRow(length, one.forward_s, one.backward_s) for length, one in by_length.items()],
            self._shrunk.micro_batch_size,
        )


def _spread(seconds: Sequence[float]) -> float:
    first, middle, third = quantiles(seconds, n=4)
    return (third - first) / middle


def _parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
