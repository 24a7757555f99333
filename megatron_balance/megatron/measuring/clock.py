"""Timing the elements of a model while Megatron trains it: events at their borders, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from megatron_balance.megatron.registry import Hook

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PURPOSE = "measuring costs"


@dataclass(frozen=True)
class PassTimes:
    """One micro-batch: seconds of embedding, layer 0, 1, ..., head and, where there is any, multi-token prediction.

    Shape [layers + 2] or [layers + 3] each way. The embedding's include fetching the batch, the head's the losses.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


@dataclass
class _Pass:
    """Events of one micro-batch by border: all of them forward, and backward those that have a gradient of their own."""

    forward: dict[int, Any] = field(default_factory=dict)
    backward: dict[int, Any] = field(default_factory=dict)


class Clock:
    """Marks, for each micro-batch, the borders of the elements embedding, layer 0, ..., head.

    Element e lies between the borders e and e + 1. Forward, a border is passed when the module behind it starts; backward,
    when the gradient of the tensor there is ready. Events cost no synchronisation within a step.

    Multi-token prediction stands inside the head: behind the final norm, before the output layer and the losses, all of
    them in a stage of several where it stands in another.
    """

    def __init__(self) -> None:
        self._passes: list[_Pass] = []
        self._is_forward = False
        self._elements = 0
        self._mtp_inside_head = False

    def hooks(self) -> tuple[Hook, ...]:
        """What has to be hooked for the first and the last border."""
        return (
            Hook(_SCHEDULES, "forward_step", _PURPOSE, "times forwards", self._around_forward),
            Hook(_SCHEDULES, "backward_step", _PURPOSE, "times backwards", self._around_backward),
        )

    def watch(self, model: Any) -> None:
        """Hook the modules of a `GPTModel` or `HybridModel` that holds embedding, layers and head."""
        decoder = model.decoder
        modules = [*decoder.layers, decoder.final_norm if hasattr(decoder, "final_norm") else decoder.final_layernorm]
        self._mtp_inside_head = splits_head(model)
        if self._mtp_inside_head:
            behind = len(modules) + 2
            model.mtp.register_forward_hook(lambda module, inputs, output: self._behind(behind, output))
            modules.append(model.mtp)
        self._elements = len(modules) + 1 + self._mtp_inside_head
        # Where layers are recomputed the first one's input may be another tensor than the embedding's output.
        model.embedding.register_forward_hook(lambda module, inputs, output: self._await_gradient(1, output))
        for border, module in enumerate(modules, start=1):
            module.register_forward_pre_hook(self._before(border), with_kwargs=True)

    def read(self) -> list[PassTimes]:
        """The micro-batches since the last call, once the device is done with them."""
        passes, self._passes = self._passes, []
        return [self._times(one) for one in passes]

    def _around_forward(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._passes.append(_Pass())
            self._is_forward = True
            self._mark(0)
            result = forward_step(*args, **kwargs)
            self._mark(self._elements)
            self._is_forward = False
            return result

        return forward

    def _around_backward(self, backward_step: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._mark(self._elements)
            result = backward_step(*args, **kwargs)
            self._mark(0)
            return result

        return backward

    def _before(self, border: int) -> Callable[..., None]:
        def mark(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            self._behind(border, kwargs.get("hidden_states", args[0] if args else None))

        return mark

    def _behind(self, border: int, tensor: Any) -> None:
        """Mark the border both ways: ``tensor`` is what passes it."""
        if self._is_forward:  # not where a backward pass recomputes
            self._mark(border)
            self._await_gradient(border, tensor)

    def _await_gradient(self, border: int, tensor: Any) -> None:
        """Mark the border backward when the gradient of ``tensor`` is ready; where it has none, it is recomputed."""
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: self._mark(border))

    def _mark(self, border: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        passed = self._passes[-1]
        (passed.forward if self._is_forward else passed.backward)[border] = event

    def _times(self, one: _Pass) -> PassTimes:
        forward_s = tuple(_seconds(one.forward[e], one.forward[e + 1]) for e in range(self._elements))
        return PassTimes(self._in_order(forward_s), self._in_order(self._backward_s(one, forward_s)))

    def _in_order(self, seconds: Sequence[float]) -> tuple[float, ...]:
        if not self._mtp_inside_head:
            return tuple(seconds)
        *chain, norm, mtp, losses = seconds
        return (*chain, norm + losses, mtp)

    def _backward_s(self, one: _Pass, forward_s: Sequence[float]) -> list[float]:
        """Between borders without a gradient of their own (full recomputation) the time is dealt out as forward."""
        backward_s: list[float] = []
        for start, stop in pairwise(sorted(one.backward)):
            elapsed_s, forward = _seconds(one.backward[stop], one.backward[start]), forward_s[start:stop]
            backward_s += [elapsed_s * part / sum(forward) for part in forward]
        return backward_s


def splits_head(model: Any) -> bool:
    """Whether ``model`` has a multi-token prediction that ends before the output layer, so that it can be told from the head."""
    mtp = getattr(model, "mtp", None)
    return mtp is not None and "output_layer" not in inspect.signature(mtp.forward).parameters


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1000
