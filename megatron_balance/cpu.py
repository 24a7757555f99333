"""The CPU runtime: Megatron trains on a machine without a GPU.

Megatron asks for CUDA in many places where it only needs memory and arithmetic. `install` redirects these requests to the
CPU and to gloo. It is a layer of its own, chosen for a whole process before Megatron is imported; it changes no result of
a computation and never touches a machine that trains on GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import logging
import os
import shutil
import sys
import sysconfig
import time
import types
import warnings
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.registry import Hook, registry
from megatron_balance.reporting import say

_CPU = torch.device("cpu")
_installed = False
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h

# Functions that create tensors and may be told `device="cuda"` or `pin_memory=True`.
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint "
    "randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()
_NEW = "new_empty new_full new_ones new_tensor new_zeros".split()


def install() -> None:
    """Make this process train on the CPU. Call before the first Megatron import; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _keep_freed_memory()
    _redirect_tensors()
    _redirect_device_queries()
    _redirect_random_state()
    _use_gloo()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists on it for TP; no meaning here
    _name_a_gpu()
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer-engine)", category=UserWarning)
    # Compiling each small fused function for the CPU takes longer than short runs gain from it.
    torch.compile = _no_compile


def _name_a_gpu() -> None:
    """Megatron 0.15 compiles a CUDA helper on import; it takes a failed compilation, but not an unknown GPU."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0"


def is_installed() -> bool:
    """Whether this process trains on the CPU runtime."""
    return _installed


def prepare_megatron() -> None:
    """Adapt the loaded Megatron itself: the few places that torch's redirection cannot reach.

    Raises:
        BalanceError: this Megatron lacks one of them, or the dataset helpers are not compiled and cannot be.
    """
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.training import initialize

    for hook in HOOKS:
        registry.apply(hook)
    _name_a_gpu()  # up to 0.16 Megatron makes it empty, and writing a checkpoint starts a process that imports it again
    name_missing_kernels()
    if hasattr(initialize, "_warmup_jit_function"):
        initialize._warmup_jit_function = lambda *args, **kwargs: None
    if hasattr(initialize, "fused_kernels"):  # up to 0.16: CUDA kernels, compiled at start
        initialize.fused_kernels.load = lambda args: None
    # Megatron warns when code that seeds the GPU moves the CPU's generator; here they are one.
    logging.getLogger(tensor_parallel_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    _provide_dataset_helpers(dataset_utils)


def name_missing_kernels() -> None:
    """Megatron 0.16 asks whether Transformer Engine's product for routers is None, but without the package leaves it undefined."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def adapt_arguments(args: Any) -> None:
    """Replace settings that only GPU kernels serve by those that compute the same on the CPU, and say so once.

    Args:
        args: Megatron's parsed arguments, before validation.
    """
    wanted = {
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "no_persist_layer_norm": True,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    changed = {name: value for name, value in wanted.items() if getattr(args, name, value) != value}
    for name, value in changed.items():
        setattr(args, name, value)
    if changed:
        settings = ", ".join(f"{name}={value}" for name, value in changed.items())
        say(f"megatron-balance: the CPU has no kernels for some settings; using {settings}")


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


# --- Megatron ---------------------------------------------------------------------------------------------------------


def _allow_no_cuda(initialize_megatron: Any) -> Any:
    @functools.wraps(initialize_megatron)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("allow_no_cuda", True)
        return initialize_megatron(*args, **kwargs)

    return initialize


def _get_rng_state(_: Any) -> Any:
    return lambda *args, **kwargs: torch.get_rng_state()


def _set_rng_state(_: Any) -> Any:
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


def _without_steps(state_dict: Any) -> Any:
    """The distributed optimizer's own values, also before its first step.

    With PyTorch's Adam, that is without Transformer Engine and Apex, Megatron reads the number of steps from the state of the
    parameters. While a checkpoint is loaded, and on a rank whose shard holds no parameter, there is none. A value is only
    needed for the structure then: loading puts the stored one in its place.
    """

    def read(self: Any) -> Any:
        inner = self.optimizer
        if _has_kernels() or len(inner.state):
            return state_dict(self)
        inner.state["none yet"] = {"step": torch.tensor(0.0)}
        try:
            return state_dict(self)
        finally:
            del inner.state["none yet"]

    return read


def _with_own_steps(load_state_dict: Any) -> Any:
    """Each parameter's own count of steps: Megatron gives all of them one tensor, which every parameter's update increments.

    Without gradients, because fp32 parameters are themselves what the optimizer updates, and Megatron copies into views of them.
    """

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = load_state_dict(self, *args, **kwargs)
        if not _has_kernels():
            for state in self.optimizer.state.values():
                if isinstance(step := state.get("step"), torch.Tensor):
                    state["step"] = step.clone()
        return result

    return load


def _with_loaded_steps(set_states: Any) -> Any:
    """Keep the steps that `load_state_dict` has put in place before: the tensors that follow have none, or a placeholder's."""

    def put(self: Any, model_param: Any, tensors: Any) -> Any:
        if not _has_kernels():
            group, place = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
            tensors = {**tensors, "step": state["step"]}
        return set_states(self, model_param, tensors)

    return put


def _has_kernels() -> bool:
    """Whether the distributed optimizer runs on Transformer Engine's or Apex's Adam."""
    from megatron.core.optimizer import distrib_optimizer

    return getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)


def _takes_head_sizes(construct: Any) -> Any:
    """Let Megatron's own attention have values of another width than its queries and keys.

    Multi-latent attention tells the widths, which only Transformer Engine's attention takes. Megatron's own reads them off
    its tensors except for that of what it puts out.
    """

    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: int | None = None, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return init


def _takes_slices(forward: Any) -> Any:
    """The same attention reshapes keys and values as if they lay in memory alone; those of multi-latent attention are slices."""

    def attend(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, query, key.contiguous(), value.contiguous(), *args, **kwargs)

    return attend


def _shares_out_tokens(construct: Any) -> Any:
    """Let torch's norms serve sequence parallelism, too: Megatron sums the gradients of parameters that are marked.

    Transformer Engine's and Apex's norms mark their own; Megatron refuses torch's, which do not.
    """

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        shared, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = construct(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = shared
        for parameter in norm.parameters():
            parameter.sequence_parallel = shared
        return norm

    return new


_NEEDED_BY = "the CPU runtime"
_ATTENTION = "megatron.core.transformer.dot_product_attention"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_SET_STATES = "DistributedOptimizer._set_main_param_and_optimizer_states"
_RANDOM = "megatron.core.tensor_parallel.random"
HOOKS = (
    Hook("megatron.training.initialize", "initialize_megatron", _NEEDED_BY, "allows no CUDA", _allow_no_cuda),
    Hook(_RANDOM, "_get_cuda_rng_state", _NEEDED_BY, "reads the CPU's generator", _get_rng_state),
    Hook(_RANDOM, "_set_cuda_rng_state", _NEEDED_BY, "sets the CPU's generator", _set_rng_state),
    Hook(_ATTENTION, "DotProductAttention.__init__", _NEEDED_BY, "takes widths of heads", _takes_head_sizes),
    Hook(_ATTENTION, "DotProductAttention.forward", _NEEDED_BY, "takes slices", _takes_slices),
    Hook(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        _NEEDED_BY,
        "shares out tokens",
        _shares_out_tokens,
    ),
    Hook(_OPTIMIZER, "DistributedOptimizer.state_dict", _NEEDED_BY, "allows no steps yet", _without_steps),
    Hook(_OPTIMIZER, "DistributedOptimizer.load_state_dict", _NEEDED_BY, "keeps steps apart", _with_own_steps),
    Hook(_OPTIMIZER, _SET_STATES, _NEEDED_BY, "keeps the loaded steps", _with_loaded_steps),
)


def _provide_dataset_helpers(dataset_utils: Any) -> None:
    """Give Megatron its compiled `helpers_cpp`, or leave it to Megatron's own compile step where that can work.

    Wheels ship the extension; a source checkout compiles it with `make` in its first training run. Its Makefile asks
    whichever `python3` comes first on PATH, so the running interpreter must.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        dataset_utils.compile_helpers = lambda: None
        return
    if installed := _installed_helpers():
        spec = importlib.util.spec_from_file_location("megatron.core.datasets.helpers_cpp", installed)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[spec.name] = module
        dataset_utils.compile_helpers = lambda: None
        return
    folder = Path(dataset_utils.__file__).parent
    search = os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_config_var("BINDIR"), os.environ["PATH"]])
    needed = ("make", os.environ.get("CXX", "g++"), "python3-config")
    missing = [name for name in needed if not shutil.which(name, path=search)]
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if missing:
        # A wheel carries the helpers, and a checkout of the same Python can use them.
        package = "pybind11" if missing == ["pybind11"] else "megatron-core"
        raise BalanceError(
            f"{folder} has no compiled helpers_cpp, and to compile it {', '.join(missing)} is missing."
            f" Run: {sys.executable} -m pip install {package}"
        )
    os.environ["PATH"] = search


def _installed_helpers() -> Path | None:
    """The extension of an installed megatron-core wheel that a checkout on `sys.path` shadows."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        candidate = Path(folder) / "megatron" / "core" / "datasets" / f"helpers_cpp{suffix}"
        if candidate.is_file():
            return candidate
    return None
