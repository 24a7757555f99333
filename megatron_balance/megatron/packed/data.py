"""The data sets of a packed job: the documents of its splits, as Megatron's command line names them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import mpu, num_microbatches_calculator
from megatron.core.datasets.utils import Split
from megatron.training import get_args

from megatron_balance.errors import BalanceError
from megatron_balance.megatron import stored_layout
from megatron_balance.megatron.arguments import topology_of
from megatron_balance.megatron.microbatches import most
from megatron_balance.megatron.packed import cursors
from megatron_balance.megatron.packed.chosen_shapes import more_of, shapes_of
from megatron_balance.megatron.packed.greeting import greeting
from megatron_balance.megatron.packed.items import PackedDataset
from megatron_balance.megatron.packed.log import COUNT, LOG, begin_interval
from megatron_balance.megatron.packed.options import PackingOptions
from megatron_balance.megatron.packed.placing import Placing, agreed_cost, agreed_profile, grid_of
from megatron_balance.megatron.packed.planner import Planner
from megatron_balance.megatron.packed.sources import Source, sources_of
from megatron_balance.megatron.packed.stages import reads_tokens
from megatron_balance.megatron.packed.totals import totals_of
from megatron_balance.megatron.registry import registry
from megatron_balance.packing.cost import VARIABLE, BinCost
from megatron_balance.packing.cut import batches
from megatron_balance.packing.documents import Blend, default_cache_folder, nothing_to_learn
from megatron_balance.packing.epoch import Epoch, epoch_squares
from megatron_balance.packing.index import epoch_order
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.profile import tuning_grid, tuning_samples
from megatron_balance.packing.sizes import alignment_of
from megatron_balance.packing.stream import Stream
from megatron_balance.reporting import global_rank, say, stops_on_error

_GREETED = 3  # global batches that are simulated for what is said at the start


@stops_on_error
def datasets(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test data set of this rank, for Megatron's `pretrain`; ``num_samples`` holds the items of each.

    Raises:
        BalanceError: the data cannot be packed.
    """
    _say_greeting()
    registry.apply(LOG)
    registry.apply(COUNT)
    begin_interval()
    with_tokens = mpu.get_tensor_model_parallel_rank() == 0 and reads_tokens(get_args(), vp_stage)
    built = []
    for split, items in zip(Split, num_samples, strict=True):
        with _naming(split):
            built.append(_built(split, items, with_tokens))
    return tuple(built)


@contextlib.contextmanager
def _naming(split: Split) -> Iterator[None]:
    """Say which split an error is about."""
    try:
        yield
    except BalanceError as error:
        more = (
            "" if split == Split.train else ", give them more with --split, or leave evaluation out with --eval-iters 0"
        )
        raise BalanceError(f"{split.name} data: {error}{more}") from error


def _built(split: Split, num_items: int | None, with_tokens: bool) -> Any:
    """The packed data set of a split, a list of them with ``--multiple-validation-sets``; None where there are no documents."""
    args = get_args()
    if num_items == 0 or (split == Split.train and args.skip_train) or not (sources := sources_of(split)):
        return None
    readers = [source for source, _ in sources]
    variable = shapes_of(args) == VARIABLE
    if num_items is not None:
        extra, totals = False, None
        if split == Split.train:
            num_items += _train_size()(num_items)  # the last step may end behind --train-samples
            extra = more_of(most(args), args) > 0
            saves_cursor = global_rank() == 0
            totals = totals_of(planner_of(split), args.mtp_num_layers or 0, saves_cursor)
        planner, rule = planner_of(split), rule_of(args)
        return PackedDataset(planner, readers, rule, num_items, split, with_tokens, variable, extra, totals)
    groups = [(reader,) for reader in readers] if args.multiple_validation_sets else [tuple(readers)]
    whole = [
        PackedDataset(epoch := epoch_of(group), group, rule_of(args), epoch.num_bins, split, with_tokens, variable)
        for group in groups
    ]
    return whole if args.multiple_validation_sets else whole[0]


datasets.is_distributed = True  # Megatron: build on every rank


def rule_of(args: Any) -> PieceRule:
    """How documents become pieces."""
    alignment = alignment_of(topology_of(args, 1))
    return PieceRule(args.seq_length, alignment, PackingOptions.from_args(args).long_documents)


@cache
def planner_of(split: Split) -> Planner:
    """The one planner of a split in this process."""
    args, stream = get_args(), stream_of(split)
    if split == Split.train:
        planner = Planner(stream, cursors.start(args, stream), _train_size(), placing())
        # The arguments as they are then: an in-process restart parses them anew.
        stored_layout.cursor_to_store[:] = [
            lambda: cursors.at(get_args().consumed_train_samples, planner, stream).to_json()
        ]
        return planner
    size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    planner = Planner(stream, (0, stream.start), _eval_size(args), placing().for_evaluation(size))
    planner.window(0)  # too few documents are refused now, not when the first evaluation comes
    return planner


@cache
def epoch_of(sources: tuple[Source, ...]) -> Epoch:
    """All documents of some data sets, for ``--full-validation``, in equally many bins for each data-parallel rank."""
    args = get_args()
    return Epoch.of(
        Blend.of([source.documents for source in sources]),
        rule_of(args),
        args.data_parallel_size * args.micro_batch_size,
    )


@cache
def stream_of(split: Split) -> Stream:
    """The pieces of a split's documents."""
    args, sources = get_args(), sources_of(split)
    blend = Blend.of([source.documents for source, _ in sources], _weights([weight for _, weight in sources]))
    return Stream(blend, rule_of(args), args.seed, partial(_order, blend, args.seed, cache_folder(args)))


def attention_share(args: Any) -> float:
    """Attention of the documents of an average bin over that of one sequence that fills it: sums of squares.

    To be asked on rank 0 alone, before Megatron has any process group.
    """
    rule = rule_of(args)
    split = next(split for split in Split if sources_of(split))
    sums = [epoch_squares(source.documents, rule) for source, _ in sources_of(split)]
    squares, tokens = map(sum, zip(*sums, strict=True))
    if not tokens:
        raise nothing_to_learn(sources_of(split)[0][0].documents, rule)
    return squares / (tokens * rule.seq_length)


@cache
def bin_cost() -> BinCost:
    """What bins cost, by rank 0, which may measure it: to be asked for the first time while a GPU is empty."""
    args = get_args()
    grid = grid_of(args, most(args))
    return BinCost(agreed_cost(args, grid), args.seq_length, shapes_of(args))


@cache
def placing() -> Placing:
    """How global batches are placed, by costs and a profile that rank 0 chooses."""
    args = get_args()
    rule, cost = rule_of(args), bin_cost()
    grid = grid_of(args, most(args))
    split, tuned = next(split for split in Split if sources_of(split)), tuning_grid(grid)

    def samples() -> list[np.ndarray]:
        return tuning_samples(stream_of(split), tuned.num_bins)

    profile = agreed_profile(samples, cost, rule, tuned, cache_folder(args))
    return Placing(grid, rule, cost, profile, partial(more_of, args=args))


@cache
def _say_greeting() -> None:
    if global_rank() == 0 and sources_of(Split.train) and not get_args().skip_train:
        stream, how = stream_of(Split.train), placing()
        first = list(batches(stream, stream.start, [how.grid.num_bins] * _GREETED))
        say(greeting(stream.blend, first, how))
        for source, _ in sources_of(Split.train):
            for note in source.notes(how.rule):
                say(f"megatron-balance: {note}")


def cache_folder(args: Any) -> Path | None:
    """Where orders and profiles are kept: as Megatron's own indices, beside the data unless told otherwise."""
    if args.data_cache_path is not None:
        return Path(args.data_cache_path)
    source, _ = next(filter(None, map(sources_of, Split)))[0]
    return None if args.mock_data else default_cache_folder(source.documents)


def _weights(weights: Sequence[float | None]) -> Sequence[float] | None:
    return None if None in weights else weights


def _order(blend: Blend, seed: int, folder: Path | None, place: int, epoch: int) -> np.ndarray:
    return epoch_order(blend.data_sets[place], seed, place, epoch, folder)


def _train_size() -> Callable[[int], int]:
    """Bins of the global batch that begins with an item, by Megatron's own rule, ramp-up and steps included."""
    calculator = copy.deepcopy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)

    def size(item: int) -> int:
        calculator.update(item, consistency_check=False)
        return calculator.get_current_running_global_batch_size()

    return size


def _eval_size(args: Any) -> Callable[[int], int]:
    return lambda item: getattr(args, "eval_global_batch_size", None) or args.global_batch_size
