"""Which shapes a job's micro-batches have, what a row's length must be a multiple of, and how many more micro-batches it takes."""

from __future__ import annotations

from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.arguments import topology_of
from megatron_balance.megatron.microbatches import counts_of
from megatron_balance.megatron.packed.options import AUTO, FLAG, Conflict, PackingOptions
from megatron_balance.packing.cost import FIXED, VARIABLE
from megatron_balance.packing.sizes import alignment_of
from megatron_balance.schedule.order import check_schedule

_KERNELS = 8  # tokens of which a row on a device takes a multiple, for the kernels of matrix products
_FP8 = 32  # the same for blocks of scaled fp8 and fp4
_FP8_BLOCKWISE = 128  # rows of a block of this recipe: else sequence-parallel ranks gather in bf16
_CAPTURED = "CUDA graphs are captured for one shape"
_NEED_FIXED = (
    Conflict("cuda_graph_impl", lambda value: value != "none", "--cuda-graph-impl", _CAPTURED),
    Conflict("enable_cuda_graph", bool, "--enable-cuda-graph", _CAPTURED),
    Conflict("external_cuda_graph", bool, "--external-cuda-graph", _CAPTURED),
    Conflict("tp_comm_overlap", bool, "--tp-comm-overlap", "its buffers have one shape"),
    Conflict(
        "fine_grained_activation_offloading",
        bool,
        "--fine-grained-activation-offloading",
        "it keeps pinned memory for every shape that it meets",
    ),
    Conflict(
        "moe_pad_expert_input_to_capacity",
        bool,
        "--moe-pad-expert-input-to-capacity",
        "ranks that share experts would have other capacities",
    ),
)


def shapes_of(args: Any) -> str:
    """``fixed`` or ``variable``: as asked for, else variable wherever the job can have it.

    Raises:
        BalanceError: variable shapes, or more micro-batches, are asked for in a job that needs fixed ones.
    """
    options, reason = PackingOptions.from_args(args), _needs_fixed(args)
    if options.shapes == VARIABLE and reason is not None:
        raise BalanceError(f"{FLAG}-shapes {VARIABLE} cannot be used with {reason}: leave one of the two out")
    usual = VARIABLE if reason is None else FIXED
    shapes = usual if options.shapes == AUTO else options.shapes
    if options.micro_batches and shapes == FIXED:
        why = f"{FLAG}-shapes {FIXED}" if reason is None else f"the fixed shapes that this job needs for {reason}"
        raise BalanceError(
            f"{FLAG}-micro-batches +{options.micro_batches} cannot be used with {why}: each would be computed at its full length"
        )
    return shapes


def _needs_fixed(args: Any) -> str | None:
    for conflict in _NEED_FIXED:
        value = getattr(args, conflict.name, None)
        if value is not None and conflict.is_set(value):
            return f"{conflict.flag} ({conflict.reason})"
    if getattr(args, "num_experts", None) and getattr(args, "moe_token_dispatcher_type", None) == "allgather":
        return "--moe-token-dispatcher-type allgather (it gathers equally many tokens of each rank; alltoall does not)"
    backend = getattr(args, "moe_flex_dispatcher_backend", None)
    pads = backend == "hybridep" and getattr(args, "moe_hybridep_pad_uneven_dispatch_inputs", False)
    flexible = getattr(args, "num_experts", None) and getattr(args, "moe_token_dispatcher_type", None) == "flex"
    if flexible and backend in ("hybridep", "ncclep") and not pads:
        return f"--moe-flex-dispatcher-backend {backend} (it dispatches equally many tokens of each rank)"
    if not _knows_communicator():
        return "a Megatron before 0.14 (its stages tell one another shapes in another way)"
    if getattr(args, "export_kd_teacher_load", None) and args.pipeline_model_parallel_size > 1:
        return "--export-kd-teacher-load (stages send on what the teacher computes, too)"
    if getattr(args, "mtp_num_layers", None) and _predicts_apart(args):
        return (
            "multi-token prediction in stages before the last (what they send on is longer by what they predict;"
            " --balanced-pipeline-mtp-placement last plans none)"
        )
    return None


def _knows_communicator() -> bool:
    """Whether stages send by the class whose answer about shapes is replaced."""
    from megatron.core.pipeline_parallel import p2p_communication

    return hasattr(p2p_communication, "P2PCommunicator")


def _predicts_apart(args: Any) -> bool:
    """Whether a layout has multi-token prediction in another stage than the loss."""
    layout = str(getattr(args, "pipeline_model_parallel_layout", None) or "")
    return "m" in layout.rpartition("|")[0]


def row_multiple(args: Any, on_gpu: bool) -> int:
    """What the length of a micro-batch's row must be a multiple of, so that ranks can share it and kernels take it."""
    shared = alignment_of(topology_of(args, 1)) * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return shared * (_low_precision_rows(args) or (_KERNELS if on_gpu else 1))


def _low_precision_rows(args: Any) -> int | None:
    """What the quantizers of Transformer Engine want a rank's tokens to be a multiple of (their ``is_quantizable``)."""
    if getattr(args, "fp8", None) and getattr(args, "fp8_recipe", None) == "blockwise":
        return _FP8_BLOCKWISE
    return _FP8 if getattr(args, "fp8", None) or getattr(args, "fp4", None) else None


def more_of(num_microbatches: int, args: Any) -> int:
    """Micro-batches that a step has beyond those that Megatron counts: as many as asked for, one for each of these at most."""
    return min(PackingOptions.from_args(args).micro_batches, num_microbatches)


def check_more(args: Any) -> None:
    """Refuse more micro-batches that the schedule or the sampler cannot take.

    Raises:
        BalanceError: names the numbers.
    """
    more = PackingOptions.from_args(args).micro_batches
    if not more:
        return
    counts, flag = counts_of(args), f"{FLAG}-micro-batches +{more}"
    if more > counts[-1]:
        raise BalanceError(f"{flag}: a step has {counts[-1]} micro-batches, and can be given so many more at most")
    for counted in counts:
        wide = counted + more_of(counted, args)
        try:
            check_schedule(topology_of(args, wide))
        except BalanceError as error:
            raise BalanceError(f"{flag} makes {wide} micro-batches: {error}") from error
