"""What Megatron makes of the values given: defaults that depend on others, the vocabulary, the topology."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.arguments import hybrid_pattern, layer_kinds
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.topology import Topology, virtual_size_of

_KNOWN_VOCABULARIES = {"GPT2BPETokenizer": 50257}


def completed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` with what Megatron's ``validate_args`` and its configuration change, where a plan depends on it.

    Only what ``ModelSpec.from_arguments`` does not do by itself. A missing key stands for Megatron's default.

    Raises:
        BalanceError: the size of the vocabulary is not given, and not known from the kind of tokenizer.
    """
    done = dict(arguments)
    if done.get("vocab_size") is None and done.get("padded_vocab_size") is None:
        done["vocab_size"] = _vocabulary(arguments)
    if arguments.get("fp16"):
        done["bf16"] = False  # that of a Hugging Face config, which a flag outranks
    if arguments.get("tensor_model_parallel_size", 1) == 1:
        done["sequence_parallel"] = False
    if arguments.get("moe_layer_recompute"):
        done["recompute_granularity"] = "selective"
        done["recompute_modules"] = list(dict.fromkeys([*(arguments.get("recompute_modules") or ["core_attn"]), "moe"]))
    if arguments.get("use_megatron_fsdp"):
        done["use_distributed_optimizer"] = True
    if arguments.get("optimizer", "adam") not in ("adam", "sgd"):  # each rank keeps the state of whole matrices
        done["use_layer_wise_distributed_optimizer"] = bool(
            done.get("use_distributed_optimizer") or arguments["optimizer"] == "dist_muon"
        )
        done["use_distributed_optimizer"] = False
    return done


def _vocabulary(arguments: Mapping[str, Any]) -> int:
    kind, model = arguments.get("tokenizer_type"), arguments.get("tokenizer_model")
    if kind in _KNOWN_VOCABULARIES:
        return _KNOWN_VOCABULARIES[kind]
    whose = f"of {kind}{f' {model}' if model else ''} " if kind else ""
    raise BalanceError(
        f"the size of the vocabulary {whose}is not known, as no tokenizer is loaded here: add --vocab-size N, or"
        " --padded-vocab-size N as a checkpoint has it"
    )


def topology_from_arguments(
    arguments: Mapping[str, Any], num_microbatches: int | None = None, world_size: int | None = None
) -> Topology:
    """The sizes of the job that ``arguments`` describe.

    Args:
        arguments: Megatron's argument names with their values; a missing key is Megatron's default.
        num_microbatches: micro-batches of a step (M); None takes them from the global batch of ``world_size`` processes.
        world_size: processes of the job; None is one model replica, which needs ``num_microbatches``.

    Raises:
        BalanceError: sizes are missing, less than 1 or do not divide.
    """
    tensor, pipeline, context = (
        _size(arguments, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")
    )
    check_weight_shards(arguments)
    check_stages_beside_fsdp(arguments)
    data_size = _data_size(world_size, tensor * pipeline * context)
    if world_size is not None:
        check_expert_ranks(arguments, world_size)
    if num_microbatches is None:
        if world_size is None:
            raise BalanceError(
                "the number of micro-batches is not known: add --num-microbatches M, or --world-size N beside"
                " --global-batch-size"
            )
        num_microbatches = _num_microbatches(arguments, data_size)
    virtual = _virtual_size(arguments, pipeline)
    if virtual > 1 and pipeline == 2 and not arguments.get("overlap_p2p_comm", True):
        raise BalanceError(
            "Megatron runs virtual stages on 2 pipeline ranks with overlapped communication only: leave"
            " --no-overlap-p2p-communication out"
        )
    group = arguments.get("microbatch_group_size_per_vp_stage")
    return Topology(
        pipeline_size=pipeline,
        num_microbatches=num_microbatches,
        virtual_size=virtual,
        micro_batch_size=_size(arguments, "micro_batch_size"),
        tensor_size=tensor,
        context_size=context,
        data_size=data_size,
        microbatch_group_size=group if virtual > 1 else None,
        overlap_moe=bool(arguments.get("overlap_moe_expert_parallel_comm")),
    )


def _size(arguments: Mapping[str, Any], name: str, default: int = 1) -> int:
    value = default if arguments.get(name) is None else arguments[name]
    if value < 1:
        raise BalanceError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    return value


def _data_size(world_size: int | None, replica: int) -> int:
    if world_size is None:
        return 1
    if world_size < 1 or world_size % replica:
        raise BalanceError(
            f"--world-size {world_size} is not a multiple of {replica}, the processes of one model replica (tensor * pipeline"
            " * context parallel size): change one of them"
        )
    return world_size // replica


def check_weight_shards(arguments: Mapping[str, Any]) -> None:
    """Refuse weights that are spread over more ranks than those of tensor parallelism, which no plan counts.

    Raises:
        BalanceError: names the flag.
    """
    tensor = _size(arguments, "tensor_model_parallel_size")
    for name, base in (("tensor", tensor), ("expert_tensor", arguments.get("expert_tensor_parallel_size") or tensor)):
        shards = arguments.get(f"{name}_parallel_num_weight_shards")
        if shards not in (None, base):
            raise BalanceError(
                f"--{name.replace('_', '-')}-parallel-num-weight-shards {shards}: weights spread over more ranks than the"
                f" {base} of tensor parallelism are not planned for"
            )


def check_stages_beside_fsdp(arguments: Mapping[str, Any]) -> None:
    """Refuse pipeline stages of weights that are sharded in full, which no Megatron runs.

    Megatron FSDP arranges all processes by data, context and tensor parallelism, without an axis for stages
    (``_get_dp_tp_mesh`` of ``mcore_fsdp_adapter.py``): with more stages than one that stops, by an error of einops or an
    assertion about ranks, once the model is built on all GPUs. PyTorch's FSDP2 is refused by ``validate_args``.

    Raises:
        BalanceError: names the flag.
    """
    stages = arguments.get("pipeline_model_parallel_size") or 1
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if arguments.get(name) and stages > 1:
            raise BalanceError(
                f"--{name.replace('_', '-')} with --pipeline-model-parallel-size {stages}: Megatron itself (0.14 to 0.19) has no"
                " pipeline stages with it, and stops: give --use-distributed-optimizer in its place, or"
                " --pipeline-model-parallel-size 1"
            )


def check_expert_ranks(arguments: Mapping[str, Any], world_size: int) -> None:
    """Refuse processes that hold no whole number of replicas of the experts; Megatron does when it makes its groups.

    Args:
        arguments: Megatron's argument names with their values.
        world_size: processes of the job.

    Raises:
        BalanceError: the world size is no multiple of expert-tensor * expert * pipeline parallel size.
    """
    tensor, expert, pipeline = (
        _size(arguments, f"{kind}_parallel_size") for kind in ("tensor_model", "expert_model", "pipeline_model")
    )
    tensor = arguments.get("expert_tensor_parallel_size") or tensor
    if world_size % (tensor * expert * pipeline):
        raise BalanceError(
            f"{world_size} processes are no multiple of {tensor * expert * pipeline}, those of one replica of the experts (expert"
            f" tensor * expert * pipeline parallel size, {tensor} * {expert} * {pipeline}): change one of them"
        )


def _num_microbatches(arguments: Mapping[str, Any], data_size: int) -> int:
    """Of the largest batch, where it grows; one where no global batch is given, as Megatron takes it."""
    micro = _size(arguments, "micro_batch_size")
    flag, batch = "--global-batch-size", _size(arguments, "global_batch_size", default=micro * data_size)
    if schedule := arguments.get("step_batch_size_schedule"):
        flag, batch = "--step-batch-size-schedule with", _largest_batch(schedule)
    if batch % (micro * data_size):
        raise BalanceError(
            f"{flag} {batch} is not a multiple of micro-batch size * data-parallel size ({micro} * {data_size}): change one of"
            " them, or give --num-microbatches M"
        )
    return batch // (micro * data_size)


def _largest_batch(schedule: str) -> int:
    """Of a schedule as Megatron takes it, THRESHOLD:SIZE entries with spaces or commas between."""
    sizes = [entry.partition(":")[2] for entry in schedule.replace(",", " ").split()]
    if not sizes or not all(re.fullmatch("0*[1-9][0-9]{0,17}", size, re.ASCII) for size in sizes):
        raise BalanceError(
            f'--step-batch-size-schedule "{schedule}" is no list of THRESHOLD:BATCH_SIZE entries, as "0:768 250B:1536": mend it, or'
            " give --num-microbatches M"
        )
    return max(map(int, sizes))


def _virtual_size(arguments: Mapping[str, Any], pipeline: int) -> int:
    """Stages on each rank, by the one flag that gives them."""
    given = {
        name: arguments[name]
        for name in (
            "pipeline_model_parallel_layout",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
        )
        if arguments.get(name) is not None
    }
    pattern = hybrid_pattern(arguments)
    if len(given) > 1 or (given and pattern):
        flags = [*given, *(["hybrid_layer_pattern"] if pattern else [])]
        raise BalanceError(
            f"{' and '.join('--' + name.replace('_', '-') for name in flags)} each give the number of virtual stages: leave"
            " all but one out"
        )
    if "pipeline_model_parallel_layout" in given:
        stages = len(parse_layout(str(given["pipeline_model_parallel_layout"])).layers)
        return _virtual_of(stages, pipeline, "--pipeline-model-parallel-layout")
    if "num_virtual_stages_per_pipeline_rank" in given:
        return _size(given, "num_virtual_stages_per_pipeline_rank")
    if pattern:
        return _virtual_of(len(pattern.stages), pipeline, "--hybrid-layer-pattern") if len(pattern.stages) > 1 else 1
    return _virtual_of_layers(arguments, pipeline) if given else 1


def _virtual_of(stages: int, pipeline: int, flag: str) -> int:
    if stages % pipeline:
        raise BalanceError(f"{flag} has {stages} stages, not a multiple of --pipeline-model-parallel-size {pipeline}")
    return stages // pipeline


def _virtual_of_layers(arguments: Mapping[str, Any], pipeline: int) -> int:
    """As training with ``--balanced-pipeline`` has it, for any number of layers: the split is planned anyway."""
    extra = sum(bool(arguments.get(f"account_for_{element}_in_pipeline_split")) for element in ("embedding", "loss"))
    each = _size(arguments, "num_layers_per_virtual_pipeline_stage")
    return virtual_size_of(len(layer_kinds(arguments)) + extra, pipeline, each)
