"""What the installed Megatron cannot pack, found by its functions, not by its number."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.packed.options import FLAG

_VARIANTS = "megatron.core.transformer.experimental_attention_variant"


def refuse_missing(args: Any) -> None:
    """Refuse models whose layers would mix documents on this Megatron.

    Raises:
        BalanceError: says which flag, and what to do.
    """
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


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _knows_bounds(function: Any) -> bool:
    return "packed_seq_params" in inspect.signature(function).parameters
