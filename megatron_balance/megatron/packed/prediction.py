"""Multi-token prediction on packed documents: weighed so that it does not matter which share a micro-batch, and rolled at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_balance.megatron.packed.context import own_places, whole
from megatron_balance.megatron.packed.copies import to_device
from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.packed.totals import told
from megatron_balance.megatron.registry import Hook

_MODULE = "megatron.core.transformer.multi_token_prediction"


def rescales() -> bool:
    """Whether this Megatron weighs a micro-batch's predictions by its numbers of labels (0.17 and newer)."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "process_mtp_loss")


def weights_hook(shares: Callable[[], Sequence[float]]) -> Hook:
    """The hook by which `process_mtp_loss` weighs by the labels of the whole global batch.

    Args:
        shares: of all labels, which remain at each depth; none where nothing is known, as in a process that measures costs.

    Megatron multiplies a micro-batch's loss at each depth by its labels over those that remain when they are rolled: documents
    differ in what remains, so that the gradient would depend on which ones share a micro-batch, and on the context-parallel rank.
    Within the function the number that remains is therefore in the proportion of the global batch, which its items say.
    """

    def wrap(process: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(process)

        def weigh(*args: Any, **kwargs: Any) -> torch.Tensor:
            from megatron.core.transformer import multi_token_prediction

            call = signature.bind(*args, **kwargs).arguments
            if not call["is_training"] or call.get("loss_mask") is None or not (known := shares()):
                return process(*args, **kwargs)
            roll, labels = multi_token_prediction.roll_tensor, call["loss_mask"].sum()
            remaining = iter([share * labels for share in known])

            def roll_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
                rolled, total = roll(tensor, *args, **kwargs)
                return rolled, next(remaining) if tensor.is_floating_point() else total  # only the mask has fractions

            multi_token_prediction.roll_tensor = roll_tensor
            try:
                return process(*args, **kwargs)
            finally:
                multi_token_prediction.roll_tensor = roll

        return weigh

    return Hook(_MODULE, "process_mtp_loss", f"{FLAG} with --mtp-num-layers", "weighs by the global batch", wrap)


def _at_once(
    roll: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`roll_tensor` that moves all sequences of a row to the left together.

    Megatron's own goes from one to the next, asks the GPU for the bounds of each, and with context parallelism sends four
    messages for it: here are none, and one collective.
    """

    def roll_tensor(
        tensor: Any,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        lengths = getattr(packed_seq_params, "lengths", None)
        places = None if lengths is None else own_places(lengths)
        alone = places is not None and cp_group is None  # a rank's own part, hidden states that are mixed
        if tensor is None or lengths is None or alone or (shifts, dims) != (-1, -1):
            return roll(tensor, shifts, dims, cp_group, packed_seq_params, **kwargs)
        row = whole(tensor.movedim(-1, 0), lengths)
        rolled = row.roll(-1, 0).index_fill(0, packed_seq_params.cu_seqlens_q[1:].long() - 1, 0)
        rolled = (rolled if places is None else rolled[to_device(places)]).movedim(0, -1)
        return rolled, rolled.sum()

    return roll_tensor


ROLL = Hook(_MODULE, "roll_tensor", f"{FLAG} with --mtp-num-layers", "rolls all sequences at once", _at_once)
WEIGHTS = weights_hook(lambda: told.batch.rolled_shares if told else ())
