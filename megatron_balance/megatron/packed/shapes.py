"""Variable shapes: micro-batches that travel the pipeline at the length of their documents, without a word about it.

Every rank has its own items and so knows the length of each of its micro-batches before it receives their activations. Where
Megatron's stages would tell one another the shape of what they send next, `P2PCommunicator._communicate_shapes` answers from
those lengths instead, in the order of the schedule: nothing is sent, and a GPU is not waited for.

Items come out of the loader in one size, as its collate wants them; a `Feed` cuts them while they are on the CPU. It is made
anew for each run of a schedule and keeps nothing beyond it, so that evaluation and steps that are run again begin afresh.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.packed.items import FILLED, LABELS, PADDING, POSITIONS, TOKENS, VALID
from megatron_balance.megatron.packed.options import FLAG as PACKING
from megatron_balance.megatron.registry import Hook

FLAG = f"{PACKING}-shapes"

Function = Callable[..., Any]
Row = dict[str, torch.Tensor]


def row_of(item: Mapping[str, torch.Tensor], slot: int, multiple: int) -> Row:
    """A micro-batch as one row: its bins one behind the other without their padding, then padding to a multiple.

    Args:
        item: as the loader gives it; of each tensor shape [bins, slots, seq_length], of ``FILLED`` [bins, slots]. What it says
            of its global batch stays as it is.
        slot: which of an item's bins.
        multiple: of what the row's length has to be.

    Returns:
        Tensors of shape [1, row], and what is said of the global batch.
    """
    filled = item[FILLED][:, slot].tolist()
    padding = -sum(filled) % multiple or (0 if any(filled) else multiple)

    def joined(value: torch.Tensor) -> torch.Tensor:
        parts = [places[:tokens] for places, tokens in zip(value[:, slot], filled, strict=True)]
        return F.pad(torch.cat(parts), (0, padding))[None]

    of_places = (TOKENS, LABELS, POSITIONS, VALID)
    row = {name: joined(value) if name in of_places else value for name, value in item.items() if name != FILLED}
    if padding:
        row[POSITIONS][0, -padding:] = torch.arange(padding) % max(multiple, PADDING)
    return row


class Feed:
    """The rows of one run of a schedule, cut from a loader's micro-batches when they are asked for.

    With more micro-batches than the loader gives, those behind its last are in the second slots of its first.
    """

    def __init__(self, loader: Iterator[Any], of_loader: int, more: int, multiple: int) -> None:
        """
        Args:
            loader: gives micro-batches.
            of_loader: how many of them there are.
            more: how many there are behind them.
            multiple: of what each row's length has to be.
        """
        self._loader, self._of_loader, self._more, self._multiple = loader, of_loader, more, multiple
        self._lengths: list[int] = []
        self._waiting: deque[Row] = deque()
        self._second: deque[Row] = deque()

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if not self._waiting:
            self._draw()
        return self._waiting.popleft()

    def length(self, microbatch: int) -> int:
        """Tokens of the row of a micro-batch, by its number in the run."""
        while len(self._lengths) <= microbatch:
            self._draw()
        return self._lengths[microbatch]

    def _draw(self) -> None:
        if len(self._lengths) < self._of_loader:
            item = next(self._loader)
            row = row_of(item, 0, self._multiple)
            if len(self._second) < self._more:
                self._second.append(row_of(item, 1, self._multiple))
        elif self._second:
            row = self._second.popleft()
        else:
            raise StopIteration
        self._waiting.append(row)
        self._lengths.append(row[POSITIONS].size(1))


class Announced:
    """The shapes that this rank receives in one run of a schedule, in both directions."""

    def __init__(self, feed: Feed, forward: list[int], backward: list[int], share: int, rest: tuple[int, ...]) -> None:
        """
        Args:
            feed: knows the lengths.
            forward: micro-batches in the order in which their activations come.
            backward: the same of gradients.
            share: ranks that a row's tokens are shared out to.
            rest: shape behind the tokens.
        """
        self._feed, self._share, self._rest = feed, share, rest
        self._forward, self._backward = deque(forward), deque(backward)

    def shapes(self, recv_prev: bool, recv_next: bool) -> tuple[list[int], list[int]]:
        """Shapes of what comes next from the stage before and from the stage behind; zeros where nothing does."""
        return self._next(self._forward if recv_prev else None), self._next(self._backward if recv_next else None)

    def check_end(self, forward_only: bool) -> None:
        """Refuse a schedule that received less than was announced.

        Raises:
            BalanceError: says how much.
        """
        if self._forward or (self._backward and not forward_only):
            raise _other_order(f"{len(self._forward)} activations and {len(self._backward)} gradients never came")

    def _next(self, due: deque[int] | None) -> list[int]:
        if due is None:
            return [0] * (1 + len(self._rest))
        if not due:
            raise _other_order("more is received than there are micro-batches")
        return [self._feed.length(due.popleft()) // self._share, *self._rest]


def _other_order(what: str) -> BalanceError:
    return BalanceError(
        f"this Megatron's schedule has an order that {FLAG} variable does not know ({what}): give {FLAG} fixed"
    )


_announced: list[Announced] = []  # of the run that is going on; none where there is no pipeline


@functools.cache  # one hook, however often arguments are parsed in a process
def schedules_hook(multiple: int, more_of: Callable[[int], int]) -> Hook:
    """The hook that feeds rows of variable length to whatever schedule is run.

    Args:
        multiple: of what each row's length has to be.
        more_of: micro-batches that a training step has beyond those that Megatron counts, by their number.
    """

    def wrap(get_forward_backward_func: Function) -> Function:
        def get(*args: Any, **kwargs: Any) -> Function:
            run = get_forward_backward_func(*args, **kwargs)

            @functools.wraps(run)
            def run_fed(*, data_iterator: Any, model: Any, num_microbatches: int, **kwargs: Any) -> Any:
                loaders = data_iterator if isinstance(data_iterator, list) else [data_iterator]
                forward_only = kwargs.get("forward_only", False)
                more = 0 if forward_only else more_of(num_microbatches)
                feeds = [Feed(loader, num_microbatches, more, multiple) for loader in loaders]
                _announced[:] = _announcements(model, feeds, num_microbatches + more)
                result = run(
                    data_iterator=feeds if isinstance(data_iterator, list) else feeds[0],
                    model=model,
                    num_microbatches=num_microbatches + more,
                    **kwargs,
                )
                for announced in _announced:
                    announced.check_end(forward_only)
                return result

            return run_fed

        return get

    return Hook(
        "megatron.core.pipeline_parallel.schedules",
        "get_forward_backward_func",
        FLAG,
        "cuts micro-batches to their length",
        wrap,
    )


def _announcements(model: Any, feeds: list[Feed], num_microbatches: int) -> list[Announced]:
    """What this rank receives in a run; nothing without a pipeline."""
    from megatron.core import mpu
    from megatron.core.utils import get_model_config

    ranks, rank = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    if ranks == 1:
        return []
    config = get_model_config(model[0] if isinstance(model, list) else model)
    # Of the one config that schedules read it from: Megatron's check of it, made for MoE, also fails dense models.
    config.variable_seq_lengths = True
    share = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    group = config.microbatch_group_size_per_vp_stage if len(feeds) > 1 else num_microbatches
    forward, backward = received(num_microbatches, len(feeds), group, rank, ranks)
    # Chunks of a rank share their micro-batches, and the first runs each before another does.
    return [Announced(feeds[0], forward, backward, share, (1, config.hidden_size))]


def received(num_microbatches: int, chunks: int, group: int, rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """The micro-batches whose activations, and those whose gradients, come to a rank, in their order.

    All ranks run the same table of micro-batches and chunks, backward with the chunks mirrored, and what the last rank sends on
    to the first one's next chunk keeps that order. Nothing comes to the first rank's first chunk, nor back to the last rank's last.

    Args:
        num_microbatches: of a run.
        chunks: virtual stages of a rank.
        group: micro-batches in a row of one chunk (Megatron's ``microbatch_group_size_per_vp_stage``).
        rank: in the pipeline.
        ranks: of the pipeline.
    """
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(num_microbatches, chunks, group)
    every, on_to_a_chunk = [k for k, _ in table], [k for k, chunk in table if chunk < chunks - 1]
    return every if rank > 0 else on_to_a_chunk, every if rank < ranks - 1 else on_to_a_chunk


def _answers(_communicate_shapes: Function) -> Function:
    def announced(self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        if not _announced:
            return _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        return _announced[0].shapes(recv_prev, recv_next)

    return announced


NO_MESSAGES = Hook(
    "megatron.core.pipeline_parallel.p2p_communication",
    "P2PCommunicator._communicate_shapes",
    FLAG,
    "knows shapes beforehand, so that none are sent",
    _answers,
)
