"""The job, made small: what the measuring process changes of its arguments, its data and its process group."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.costs.table import lengths_to_cost, shapes_of
from megatron_balance.megatron.measuring.software import local_device
from megatron_balance.model import LayerKind, ModelSpec, hybrid_pattern, layer_kinds
from megatron_balance.packing.cost import FIXED
from megatron_balance.reading import Scalar
from megatron_balance.topology import Topology

_COPIES = 2  # of each kind of layer, whose mean counts: the first of a stage is slower than those behind it

# What a measurement must not do, or what cannot work on one rank. Names that a Megatron does not have are passed over.
_OVERRIDES: dict[str, Any] = {
    # One stage that holds everything; embedding and head with weights of their own, as the first and last of several have.
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "microbatch_group_size_per_vp_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "defer_embedding_wgrad_compute": False,
    "untie_embeddings_and_output_weights": True,
    # Nothing is read or left behind.
    "load": None,
    "save": None,
    "pretrained_checkpoint": None,
    "non_persistent_save_interval": None,
    "non_persistent_ckpt_type": None,
    "use_checkpoint_args": False,
    "exit_on_missing_checkpoint": False,
    "async_save": False,
    "log_progress": False,
    "tensorboard_dir": None,
    "wandb_project": "",
    "mock_data": True,
    "sft": False,
    "fim_data": False,
    "moe_use_upcycling": False,
    "eval_micro_batch_size": None,
    "eval_global_batch_size": None,
    "dataloader_inter_document_masking": False,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "data_args_path": None,
    "per_split_data_args_path": None,
    # The measurement ends the loop; neither schedules of batch and learning rate nor checks between steps take part.
    "train_iters": 10**6,
    "train_samples": None,
    "rampup_batch_size": None,
    "step_batch_size_schedule": None,
    "decrease_batch_size_if_needed": False,
    # The same arithmetic, but the weights stay: routing does not drift, and no step is skipped while fp16 finds its scale.
    "lr": 0.0,
    "min_lr": 0.0,
    "lr_warmup_init": 0.0,
    "initial_loss_scale": 1.0,
    "min_loss_scale": 1.0,
    "lr_decay_style": "constant",
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "eval_iters": 0,
    "eval_interval": 10**6,
    "full_validation": False,
    "skip_train": False,
    "log_interval": 10**6,
    "timing_log_level": 0,
    "exit_interval": None,
    "exit_duration_in_mins": None,
    "exit_signal_handler": False,
    "adlr_autoresume": False,
    "rerun_mode": "disabled",
    "check_for_nan_in_loss_and_grad": False,
    "check_for_spiky_loss": False,
    "profile": False,
    "log_straggler": False,
    "perform_rl_step": False,
    "enable_one_logger": False,
    "otel_enabled": False,
    "config_logger_dir": "",
    "dump_param_to_param_group_map": None,
    "record_memory_history": False,
    "moe_routing_trace_path": None,
    "run_workload_inspector_server": False,
    "gpu_sniff_test_interval": None,
    "fault_injector_ranks": None,
    "fault_injector_num_ranks": None,
    "log_energy": False,
    "log_memory_interval": None,
    "save_params_interval": None,
    "save_wgrads_interval": None,
    "save_dgrads_interval": None,
    "logits_save_dir": None,
    "logits_load_dir": None,
    "replication": False,
    # Captured graphs would run past the hooks, and overlapped communication past a group that does not communicate.
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "overlap_p2p_comm": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "ep_overlap_early_attn_memory_release": False,
    "tp_comm_overlap": False,
    "nccl_ub": False,
    # What goes by a layer's number means nothing in a chain of few.
    "no_rope_freq": None,
    "first_last_layers_bf16": False,
    "moe_router_force_load_balancing": True,
}


@dataclass(frozen=True)
class Shrunk:
    """How a job was made small.

    Attributes:
        layers: kind of each layer of the small model.
        lengths: tokens of a sequence in each micro-batch of a step; the longest is the job's own.
        micro_batch_size: sequences in a micro-batch.
        given: the job's arguments that were changed, by name.
    """

    layers: tuple[LayerKind, ...]
    lengths: tuple[int, ...]
    micro_batch_size: int
    given: Mapping[str, Any]

    def holds_for(self) -> dict[str, Scalar]:
        """What the measured costs depend on, of the job as it was given; to be asked after validation."""
        from megatron.training import get_args

        arguments = {**vars(get_args()), **self.given}
        return shapes_of(ModelSpec.from_arguments(arguments), _microbatch(arguments))


def shrink(args: Any, full_length_passes: int) -> Shrunk:
    """Change parsed arguments, before validation, into those of a measurement.

    Args:
        full_length_passes: micro-batches of a step with the job's own sequence length.
    """
    before = dict(vars(args))
    *_, last = kinds_given = layer_kinds(before)
    kinds = [
        *(kind for kind in dict.fromkeys(kinds_given) if kind != last),
        last,
    ]  # multi-token prediction repeats the last
    layers = tuple(kind for kind in kinds for _ in range(_COPIES))
    own = args.seq_length if args.seq_length is not None else args.encoder_seq_length
    *shorter, _ = lengths_to_cost(own, _microbatch(before))
    lengths = (*[own] * full_length_passes, *shorter)
    ours = {name: None for name in before if name.startswith(("balanced_pipeline", "straggler_trace"))}
    if before.get("varlen_packing"):
        ours |= {"varlen_packing_shapes": FIXED, "varlen_packing_micro_batches": None}  # micro-batches come as they are
    for name, value in {**_OVERRIDES, **ours}.items():
        if name in before:
            setattr(args, name, value)
    _build_layers(args, kinds_given, layers)
    if args.recompute_method == "block":
        # All layers alike; `CostTable.chain` takes off what a stage does not recompute.
        args.recompute_method, args.recompute_num_layers = "uniform", 1
    if isinstance(getattr(args, "cp_comm_type", None), list):  # one for each layer of the job
        args.cp_comm_type = args.cp_comm_type[:1]
    replica = args.tensor_model_parallel_size * args.context_parallel_size
    args.world_size = max(args.world_size, replica)
    args.global_batch_size = args.micro_batch_size * (args.world_size // replica) * len(lengths)
    given = {name: value for name, value in before.items() if getattr(args, name) != value}
    return Shrunk(layers, lengths, args.micro_batch_size, given)


def _build_layers(args: Any, given: Sequence[LayerKind], layers: Sequence[LayerKind]) -> None:
    """Have Megatron build ``layers``, each like one of those ``given``."""
    pattern = hybrid_pattern(vars(args))
    if any(kind.window is not None for kind in layers):
        args.window_attn_skip_freq = [int(kind.window is not None) for kind in layers]
    if args.num_experts:
        _keep_local_experts(args)
    if pattern is not None:  # a hybrid model: a letter a layer; multi-token prediction stays
        letters = dict(zip(given, pattern.letters, strict=True))
        args.num_layers = None  # Megatron counts the letters
        args.hybrid_layer_pattern = str(replace(pattern, stages=("".join(letters[kind] for kind in layers),)))
        args.hybrid_override_pattern = args.mtp_hybrid_override_pattern = None
        return
    setattr(args, "num_layers" if args.num_layers is not None else "encoder_num_layers", len(layers))
    if text := _block_settings(args):  # a configuration a layer
        settings = json.loads(text)
        blocks = dict(zip(given, settings["block_configs"], strict=True))
        settings |= {"block_configs": [blocks[kind] for kind in layers], "num_hidden_layers": len(layers)}
        args.heterogeneous_layers_config_encoded_json = json.dumps(settings)
    if any(kind.moe for kind in layers):
        args.moe_layer_freq = [int(kind.moe) for kind in layers]


def _block_settings(args: Any) -> str | None:
    text, path = (getattr(args, f"heterogeneous_layers_config_{what}", None) for what in ("encoded_json", "path"))
    return text or (Path(path).read_text() if path else None)


def _microbatch(arguments: Mapping[str, Any]) -> Topology:
    """The sizes that the costs of a micro-batch depend on."""
    return Topology(
        pipeline_size=1,
        num_microbatches=1,
        micro_batch_size=arguments["micro_batch_size"],
        tensor_size=arguments["tensor_model_parallel_size"],
        context_size=arguments["context_parallel_size"],
    )


def _keep_local_experts(args: Any) -> None:
    """Experts of one expert-parallel rank, visited by as many copies of tokens as all ranks together send them.

    Routing across ranks would wait for tokens that a group of one process never gets.
    """
    shards = args.expert_model_parallel_size
    local = args.num_experts // shards
    if shards > 1 and local < (args.moe_router_topk or 1):
        raise NotImplementedError(
            f"a rank holds {local} of the {args.num_experts} experts, fewer than a token visits ({args.moe_router_topk})"
        )
    args.expert_model_parallel_size, args.num_experts = 1, local
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":  # its kernels talk to other ranks
        args.moe_token_dispatcher_type = "alltoall"
        for name in ("moe_enable_deepep", "moe_flex_dispatcher_backend"):
            if hasattr(args, name):
                setattr(args, name, None)
    for name in ("moe_router_num_groups", "moe_router_group_topk"):  # groups are ranks
        if shards > 1 and hasattr(args, name):
            setattr(args, name, None)


# --- process group ----------------------------------------------------------------------------------------------------


def use_fake_groups(world_size: int) -> None:
    """Make this process rank 0 of ``world_size``, in groups whose collectives return at once and move nothing.

    So the shapes are those of a tensor-parallel rank although there is one process. Megatron, which finds the groups made,
    then leaves the choice of the GPU to us.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(local_device())
    initialize, make_group = (inspect.unwrap(one) for one in (dist.init_process_group, dist.new_group))
    initialize("fake", rank=0, world_size=world_size, store=FakeStore())

    @functools.wraps(make_group)
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make_group(ranks, backend="fake")

    dist.new_group = dist.distributed_c10d.new_group = new_group


# --- data -------------------------------------------------------------------------------------------------------------


class Batches:
    """Endless micro-batches of random tokens, of the sequence lengths given in turn."""

    def __init__(self, args: Any, lengths: Sequence[int]) -> None:
        """Make one micro-batch of each length, with the keys of Megatron's GPT dataset, on the host."""
        self._batches = [_batch(args, length) for length in lengths]
        self._next = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self._next += 1
        return self._batches[(self._next - 1) % len(self._batches)]


def _batch(args: Any, length: int) -> dict[str, torch.Tensor]:
    shape = (args.micro_batch_size, length)
    generator = torch.Generator().manual_seed(args.seed)
    batch = {
        "tokens": torch.randint(args.padded_vocab_size, shape, generator=generator),
        "labels": torch.randint(args.padded_vocab_size, shape, generator=generator),
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(length).expand(shape).contiguous(),
    }
    if args.create_attention_mask_in_dataloader:
        above = torch.ones(length, length).triu(1).bool()
        batch["attention_mask"] = above.expand(args.micro_batch_size, 1, length, length).contiguous()
    return {name: value.pin_memory() for name, value in batch.items()}


def serves(batches: Callable[[], Iterator[Any]]) -> Callable[[Any], Any]:
    """A wrapper of `build_train_valid_test_data_iterators` whose training data are ``batches``, without others."""

    def wrap(_: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            settings = get_args()
            settings.do_train, settings.do_valid, settings.do_test = 1, 0, 0
            return batches(), None, None

        return build

    return wrap
