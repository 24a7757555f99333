"""Multi-token prediction on packed documents: its gradient does not depend on which of them share a micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_balance.megatron.packed.options import FLAG
from megatron_balance.megatron.registry import Hook

_MODULE = "megatron.core.transformer.multi_token_prediction"


def rescales() -> bool:
    """Whether this Megatron weighs a micro-batch's predictions by its numbers of labels (0.17 and newer)."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "process_mtp_loss")


def rolled_shares(tokens: np.ndarray, depths: int) -> list[float]:
    """Labels that remain at each depth over all labels.

    Args:
        tokens: labels of each piece of a global batch, shape [pieces].
        depths: ``--mtp-num-layers``.
    """
    return [float(np.maximum(tokens - depth, 0).sum() / tokens.sum()) for depth in range(1, depths + 1)]


def weights_hook(shares: Callable[[], list[float]]) -> Hook:
    """The hook by which `process_mtp_loss` weighs by the labels of the whole global batch.

    Args:
        shares: of all labels, which remain at each depth.

    Megatron multiplies a micro-batch's loss at each depth by its labels over those that remain when they are rolled: documents
    differ in what remains, so that the gradient would depend on which ones share a micro-batch, and on the context-parallel rank.
    Within the function the number that remains is therefore in the proportion of the global batch, which each rank knows.
    """

    def wrap(process: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(process)

        def weigh(*args: Any, **kwargs: Any) -> torch.Tensor:
            from megatron.core.transformer import multi_token_prediction

            call = signature.bind(*args, **kwargs).arguments
            if not call["is_training"] or call.get("loss_mask") is None:
                return process(*args, **kwargs)
            roll, labels = multi_token_prediction.roll_tensor, call["loss_mask"].sum()
            remaining = iter([share * labels for share in shares()])

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


def _of_global_batch() -> list[float]:
    """`rolled_shares` of the global batch that is trained on."""
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    from megatron_balance.megatron.packed.data import planner_of

    args = get_args()
    window = planner_of(Split.train).window(args.consumed_train_samples)
    return rolled_shares(window.batch.pieces.tokens, args.mtp_num_layers)


WEIGHTS = weights_hook(_of_global_batch)
