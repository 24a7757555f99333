"""Functions of Megatron that torch's redirection does not reach."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_balance.megatron.registry import Hook


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
