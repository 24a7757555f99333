"""Calls of torch that ask for CUDA or NCCL, redirected to the CPU and to gloo."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import time
import types
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h

# Functions that create tensors and may be told `device="cuda"` or `pin_memory=True`.
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint "
    "randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()
_NEW = "new_empty new_full new_ones new_tensor new_zeros".split()


def redirect() -> None:
    """Redirect them all, in this process."""
    _keep_freed_memory()
    _redirect_tensors()
    _redirect_device_queries()
    _redirect_random_state()
    _use_gloo()
    # Compiling each small fused function for the CPU takes longer than short runs gain from it.
    torch.compile = _no_compile


def _keep_freed_memory() -> None:
    """Make glibc keep the memory of large tensors that are freed, as CUDA's caching allocator does.

    By default it returns blocks of 32 MB and more to the kernel, and each micro-batch faults its logits and the gradients of
    the embedding in anew: a multiple of the time that computing them takes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such switch
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return create


def _moved_to_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return function(self, *args, **kwargs)

    return move


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _moved_to_cpu(kind.to)
        kind.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)


def _type_as_on_cuda(original: Any) -> Any:
    """Megatron's optimizer and gradient clipping compare the names of CUDA tensor types."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(args[0] if args else None, str):
            args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
        return original(self, *args, **kwargs)

    return type_


def _no_compile(model: Any = None, **_: Any) -> Any:
    return (lambda function: function) if model is None else model


# --- torch.cuda -------------------------------------------------------------------------------------------------------


class _Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    wait_stream = wait_event

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


class _Event:
    """An event that keeps the wall clock, so that `elapsed_time` works."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end.seconds - self.seconds) * 1000

    def synchronize(self) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return True


def _redirect_device_queries() -> None:
    cuda, stream = torch.cuda, _Stream()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=memory, multi_processor_count=os.cpu_count() or 1
    )

    def answer(value: Any) -> Any:
        # A function of its own for each name: torch's compiler refuses one function under two names.
        return lambda *args, **kwargs: value

    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    # `is_available` stays False; one device, else Megatron skips model-parallel initialisation and seeding.
    cuda.device_count = answer(1)
    cuda.current_device = answer(_CPU)
    cuda.current_stream, cuda.default_stream = answer(stream), answer(stream)
    cuda.stream, cuda.device = answer(nullcontext()), answer(nullcontext())
    cuda.get_device_properties = answer(properties)
    cuda.get_device_capability = answer((0, 0))
    cuda.get_device_name = answer("CPU")
    cuda.mem_get_info = answer((memory, memory))
    cuda.is_current_stream_capturing = answer(False)
    cuda.memory_stats = answer(defaultdict(int))
    for name in "memory_allocated memory_reserved max_memory_allocated max_memory_reserved device_memory_used".split():
        setattr(cuda, name, answer(0))
    for name in (
        "synchronize set_device set_stream empty_cache ipc_collect reset_peak_memory_stats reset_max_memory_allocated"
    ).split():
        setattr(cuda, name, answer(None))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, answer(None))


# --- random state -----------------------------------------------------------------------------------------------------


def _redirect_random_state() -> None:
    generator = torch.default_generator
    for module in (torch.cuda, torch.cuda.random):
        for name in ("manual_seed", "manual_seed_all"):
            # `torch.manual_seed` would call `torch.cuda.manual_seed`, that is, this function.
            setattr(module, name, lambda seed: generator.manual_seed(seed))
        module.get_rng_state = lambda *args, **kwargs: generator.get_state()
        module.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
    torch.cuda.default_generators = (generator,)


# --- torch.distributed ------------------------------------------------------------------------------------------------


def _use_gloo() -> None:
    module = dist.distributed_c10d
    for name in ("init_process_group", "new_group"):
        wrapped = _with_gloo(getattr(module, name))
        for place in (dist, module):
            setattr(place, name, wrapped)
    # Megatron may free a sent activation as soon as the send is queued (0.16 with virtual stages). NCCL keeps the memory
    # alive by its stream, gloo reads it later: send a copy.
    sending = module.isend

    @functools.wraps(sending)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return sending(tensor.clone(), *args, **kwargs)

    exchanging = module.all_to_all_single

    @functools.wraps(exchanging)
    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Sizes that Megatron moves off the GPU as numbers are tensors already here, which torch does not take.
        args = tuple(arg.tolist() if isinstance(arg, torch.Tensor) else arg for arg in args)
        kwargs = {name: arg.tolist() if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()}
        return exchanging(output, input, *args, **kwargs)

    for place in (dist, module):
        place.isend = isend
        place.all_to_all_single = all_to_all_single


def _with_gloo(function: Any) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.arguments["backend"] = "gloo"
        call.arguments.pop("device_id", None)
        call.arguments.pop("pg_options", None)
        return function(*call.args, **call.kwargs)

    return make_group
