"""Where the recorder listens in Megatron. All of it is put there only with the flag."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron_balance.diagnosis.trace import (
    CLIP,
    COMBINED,
    EMBEDDING,
    FORWARD,
    GATHER,
    LAYERNORM,
    OPTIMIZER,
    SCATTER,
    SEPARATE,
    TRANSFERS,
)
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.chunks import first_tensor, inner
from megatron_balance.megatron.recorder.options import FLAG
from megatron_balance.megatron.recorder.recorder import Recorder, never_stops_training
from megatron_balance.megatron.registry import Hook, registry

Function = Callable[..., Any]
_DIRECTIONS = dict(zip(("send_next", "recv_prev", "send_prev", "recv_next"), TRANSFERS, strict=True))

_PIPELINE = "megatron.core.pipeline_parallel"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_DDP = "megatron.core.distributed.distributed_data_parallel"


def apply(recorder: Recorder) -> None:
    """Put the hooks in place.

    Raises:
        BalanceError: one that is needed has no place in this Megatron.
    """
    for hook in needed(recorder):
        registry.apply(hook)
    for hook in optional(recorder):
        try:
            registry.apply(hook)
        except BalanceError:  # this Megatron does not do what it would listen to
            continue


def needed(recorder: Recorder | None) -> tuple[Hook, ...]:
    """Hooks without which there is no trace. Without a recorder they can be looked for, not applied."""
    return (
        Hook("megatron.training.training", "train_step", FLAG, "bounds the step", lambda f: _step(recorder, f)),
        Hook(f"{_PIPELINE}.schedules", "forward_step", FLAG, "times forwards", lambda f: _forward(recorder, f)),
        Hook(f"{_PIPELINE}.schedules", "backward_step", FLAG, "times backwards", lambda f: _backward(recorder, f)),
        Hook(
            f"{_PIPELINE}.p2p_communication",
            "P2PCommunicator._communicate",
            FLAG,
            "times transfers",
            lambda f: _transfers(recorder, f),
        ),
        Hook(_DDP, "DistributedDataParallel.finish_grad_sync", FLAG, "times gradients", _timed(recorder, SCATTER)),
        Hook(_DDP, "DistributedDataParallel.start_param_sync", FLAG, "times parameters", _timed(recorder, GATHER)),
        Hook(_FINALIZE, "finalize_model_grads", FLAG, "times what else is reduced", _timed(recorder, SEPARATE)),
        Hook(
            "megatron.core.optimizer.clip_grads",
            "clip_grad_by_total_norm_fp32",
            FLAG,
            "times clipping",
            _timed(recorder, CLIP),
        ),
        Hook("megatron.training.training", "training_log", FLAG, "logs the stages", lambda f: _log(recorder, f)),
    )


def optional(recorder: Recorder) -> tuple[Hook, ...]:
    """Hooks for what not every Megatron does."""
    return (
        Hook(_FINALIZE, "_allreduce_non_tensor_model_parallel_grads", FLAG, "times norms", _timed(recorder, LAYERNORM)),
        Hook(_FINALIZE, "_allreduce_word_embedding_grads", FLAG, "times embedding", _timed(recorder, EMBEDDING)),
        Hook(
            f"{_PIPELINE}.combined_1f1b",
            "combined_forward_backward_step",
            FLAG,
            "times combined passes",
            lambda f: _combined(recorder, f),
        ),
        *(
            Hook("megatron.training.training", name, FLAG, "leaves it out of steps", lambda f: _between(recorder, f))
            for name in ("evaluate_and_print_results", "save_checkpoint_and_time")
        ),
    )


def _step(recorder: Recorder, train_step: Function) -> Function:
    signature = inspect.signature(train_step)

    def step(*args: Any, **kwargs: Any) -> Any:
        _begin(recorder, signature, args, kwargs)
        try:
            result = train_step(*args, **kwargs)
        except BaseException:
            recorder.drop()
            raise
        recorder.end()
        return result

    return step


@never_stops_training
def _begin(recorder: Recorder, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    given = signature.bind(*args, **kwargs).arguments
    recorder.begin(_number(), given["model"], given["optimizer"])


def _number() -> int:
    """Of the step that begins, from 1."""
    from megatron.training import get_args

    return int(get_args().curr_iteration) + 1


def _timed(recorder: Recorder, kind: str) -> Callable[[Function], Function]:
    def wrap(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not recorder.in_step or recorder.in_pass or kind in recorder.idle:
                return function(*args, **kwargs)
            start = recorder.mark()
            result = function(*args, **kwargs)
            recorder.add(kind, start)
            return result

        return call

    return wrap


def _forward(recorder: Recorder, forward_step: Function) -> Function:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not recorder.in_step:
            return forward_step(*args, **kwargs)
        recorder.begin_pass()
        result = forward_step(*args, **kwargs)
        recorder.end_forward(FORWARD, kwargs.get("vp_stage"), kwargs.get("current_microbatch"), result)
        return result

    return forward


def _backward(recorder: Recorder, backward_step: Function) -> Function:
    def backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.in_step:
            return backward_step(input_tensor, output_tensor, *args, **kwargs)
        recorder.begin_pass(output_tensor)
        result = backward_step(input_tensor, output_tensor, *args, **kwargs)
        recorder.end_backward()
        return result

    return backward


def _combined(recorder: Recorder, combined_step: Function) -> Function:
    """A merged pass is one operation, of the forward's micro-batch, or the backward's where it has no forward.

    What is transferred meanwhile is part of it.
    """
    signature = inspect.signature(combined_step)

    def combined(*args: Any, **kwargs: Any) -> Any:
        if not recorder.in_step:
            return combined_step(*args, **kwargs)
        given = _begin_combined(recorder, signature, args, kwargs)
        result = combined_step(*args, **kwargs)
        _end_combined(recorder, given, result)
        return result

    return combined


@never_stops_training
def _begin_combined(
    recorder: Recorder, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    given = signature.bind(*args, **kwargs).arguments
    recorder.begin_pass(given["b_output_tensor"] if given.get("b_model") is not None else None)
    return given


@never_stops_training
def _end_combined(recorder: Recorder, given: dict[str, Any], result: Any) -> None:
    if given.get("f_model") is None:
        recorder.end_backward()
    else:
        kind = FORWARD if given.get("b_model") is None else COMBINED
        recorder.end_forward(kind, given.get("f_model_chunk_id"), given.get("current_microbatch"), result)


def _transfers(recorder: Recorder, communicate: Function) -> Function:
    """Each direction of a transfer is an operation of its own; those of one call begin and end together.

    A receive that overlaps computation is what is waited for it: it begins when the schedule comes to wait.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.in_step or recorder.in_pass:
            return communicate(self, *args, **kwargs)
        start = recorder.mark()
        result = communicate(self, *args, **kwargs)
        _transferred(recorder, start, kwargs, result)
        return result

    return call


@never_stops_training
def _transferred(recorder: Recorder, start: Any, given: dict[str, Any], result: Any) -> None:
    later = result[2] if len(result) > 2 and isinstance(result[2], dict) else {}
    ended = None
    for name, kind in _DIRECTIONS.items():
        if name.startswith("recv") and name in later:
            later[name] = _Awaited(recorder, kind, later[name])
        elif given.get(name) if name.startswith("recv") else given.get(f"tensor_{name}") is not None:
            ended = ended or recorder.mark()
            recorder.add(kind, start, ended)


class _Awaited:
    """A handle of Megatron's whose wait is timed."""

    def __init__(self, recorder: Recorder, kind: str, handle: Any) -> None:
        self._recorder, self._kind, self._handle = recorder, kind, handle

    def wait(self, *args: Any) -> Any:
        if not self._recorder.in_step or self._recorder.in_pass:
            return self._handle.wait(*args)
        start = self._recorder.mark()
        result = self._handle.wait(*args)
        self._recorder.add(self._kind, start)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _log(recorder: Recorder, training_log: Function) -> Function:
    signature = inspect.signature(training_log)

    def log(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        _logged(recorder, signature, args, kwargs)
        return result

    return log


@never_stops_training
def _logged(recorder: Recorder, signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    recorder.log(signature.bind(*args, **kwargs).arguments["iteration"])


def _between(recorder: Recorder, function: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.part()
        return function(*args, **kwargs)

    return call


def listen_to_sequences(recorder: Recorder, chunks: Sequence[Any]) -> None:
    """Have the recorder see the bounds of the sequences that each model chunk is given."""

    def see(module: Any, args: Any, kwargs: Any) -> None:
        if recorder.in_pass and (packed := kwargs.get("packed_seq_params")) is not None:
            recorder.see_sequences(packed)

    for chunk in chunks:
        chunk.register_forward_pre_hook(see, with_kwargs=True)


def listen_to_embedding(recorder: Recorder, chunks: Sequence[Any]) -> None:
    """Have the recorder see where the embedding of the first stage ends in a forward pass, and begins in the backward pass."""

    def ends(module: Any, args: Any, output: Any) -> None:
        if recorder.in_pass:
            recorder.see_embedding()
            embedded = first_tensor(output)
            if embedded.requires_grad:
                embedded.register_hook(begins)

    def begins(gradient: Any) -> None:
        if recorder.in_pass:
            recorder.see_embedding()

    if (embedding := getattr(inner(chunks[0]), "embedding", None)) is not None:
        embedding.register_forward_hook(ends)


def listen_to_optimizer(recorder: Recorder, optimizer: Any) -> None:
    """Time ``optimizer.step``, whatever class it is of."""
    optimizer.step = functools.wraps(optimizer.step)(_timed(recorder, OPTIMIZER)(optimizer.step))
