"""What the installed Megatron cannot pack, found by its functions, not by its number."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.packed.options import FLAG

_VARIANTS = "megatron.core.transformer.experimental_attention_variant"


def refuse_missing(args: Any) -> None:
    """Refuse models whose layers would mix documents on this Megatron, and gradients that it would not divide by the labels.

    Raises:
        BalanceError: says which flag, and what to do.
    """
    if getattr(args, "use_torch_fsdp2", False) and not _divides_gradients():
        raise BalanceError(
            f"{FLAG} cannot be used with --use-torch-fsdp2 on this Megatron, which then does not divide gradients by the number of"
            " labels as --calculate-per-token-loss asks: take the distributed optimizer or --use-megatron-fsdp"
        )
    if args.mtp_num_layers:
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        if not _knows_bounds(roll_tensor):
            raise BalanceError(
                f"{FLAG} cannot be used with --mtp-num-layers on this Megatron, which would have the last tokens of a document"
                " predict the next one's: take Megatron 0.16 or newer, or leave --mtp-num-layers out"
            )
    if any(getattr(args, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern")):
        from megatron.core.ssm.mamba_mixer import MambaMixer

        if not _knows_bounds(MambaMixer.forward):
            raise BalanceError(
                f"{FLAG} cannot be used with hybrid patterns on this Megatron, whose Mamba layers carry their state from one"
                " document into the next: take Megatron 0.16 or newer"
            )
    if getattr(args, "experimental_attention_variant", None) == "dsa" and not _has(f"{_VARIANTS}.dsa_masking"):
        raise BalanceError(
            f"{FLAG} cannot be used with --experimental-attention-variant dsa on this Megatron, whose sparse attention chooses"
            " tokens of other documents: take Megatron 0.19 or newer"
        )


def pads_values() -> bool:
    """Whether latent attention gives packed values the size of queries, and cuts the result."""
    from megatron.core.transformer import multi_latent_attention

    return hasattr(multi_latent_attention, "_prepare_mla_core_attention_value")


def _divides_gradients() -> bool:
    """Whether torch's FSDP has a way of its own to scale gradients: what it inherits does nothing."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel

    return TorchFullyShardedDataParallel.scale_gradients is not _BaseDataParallel.scale_gradients


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _knows_bounds(function: Any) -> bool:
    return "packed_seq_params" in inspect.signature(function).parameters
