"""What a command line asks of `megatron-balance pack`: the sizes of the job, its costs, and where its data are."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.command_line import CommandLine, read_command_line, topology_from_arguments
from megatron_balance.costs.devices import Device, device_chosen
from megatron_balance.errors import BalanceError
from megatron_balance.packing.cost import VARIABLE, BinCost, SequenceCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.length_files import ENDINGS, is_named_so, number_in
from megatron_balance.packing.pieces import PieceRule
from megatron_balance.packing.sizes import alignment_of, check_seq_length, grid_of
from megatron_balance.packing.splits import ALL, MEGATRONS_SPLIT, Part, train_part
from megatron_balance.planning.flags import ANALYTIC, FLAG, PROFILE
from megatron_balance.planning.job import Job, read_job
from megatron_balance.reading import MOST_WHOLE
from megatron_balance.schedule.order import check_schedule

DEFAULT_RATIO = 49152.0  # an 8B model of hidden size 4096: 2 * parameters of a layer over 2 * hidden size
_DEFAULT_BINS = 256
_DEVICE = "generic"
_MOST_BINS = 2**20
_MOST_RATIO = 1e12
PACKING = "--varlen-packing"
_TRAINING_ONLY = (f"{PACKING}-attention", f"{PACKING}-micro-batches")  # without effect on what is shown


@dataclass(frozen=True)
class Request:
    """What is asked, without the data.

    Attributes:
        data: words as ``--data-path`` takes them: prefixes or files of lengths, with weights before them or without.
        part: of each data set's documents, those of training.
        rule: how documents become pieces.
        grid: the bins of a global batch and where they are run.
        bin_cost: what a bin costs.
        cost_source: where that is from, for the user.
        in_seconds: whether costs are seconds of a device, and not units of ``ratio * s + s^2``.
        seed: of the documents' order.
        batches: global batches that are cut and simulated.
        cache_folder: for orders of documents and tuned profiles; None keeps nothing.
        assumed: flags that were not given, with the values that were taken.
        ignored: flags of the command line that do not matter to packing.
    """

    data: tuple[str, ...]
    part: Part
    rule: PieceRule
    grid: Grid
    bin_cost: BinCost
    cost_source: str
    in_seconds: bool
    seed: int
    batches: int
    cache_folder: str | None
    assumed: tuple[str, ...]
    ignored: tuple[str, ...]


def read_request(options: argparse.Namespace, argv: Sequence[str]) -> Request:
    """Read the command's own flags and, in ``argv``, data sets or a launcher, and Megatron's flags.

    Raises:
        BalanceError: a value is missing or impossible; names it.
    """
    _check_numbers(options)
    device = None if options.balanced_pipeline_device is None else device_chosen(options.balanced_pipeline_device)
    prefixes, words = _apart(argv)
    data = _data(options, prefixes)
    line = _read(words)
    arguments = line.arguments
    has_model = options.hf_config is not None or bool({"num_layers", "hidden_size"} & {*arguments})
    if line.ignored and not has_model and not _is_launched(argv):
        raise BalanceError(
            f"unrecognized arguments: {' '.join(line.ignored)} (flags that do not matter to packing are passed over beside a"
            " model's flags only)"
        )
    seq_length = _seq_length(arguments)
    assumed: list[str] = []
    part = _part(options, data, assumed)
    world_size = _world_size(options, line, assumed)
    num_microbatches = _num_microbatches(options, arguments, world_size, assumed)
    if has_model:
        job = read_job(words, options.hf_config, num_microbatches, world_size, knows_layers=False)
        arguments, topology = job.arguments, job.topology
    else:
        topology = topology_from_arguments(arguments, num_microbatches, world_size)
    check_schedule(topology)
    check_seq_length(seq_length, topology, bool(arguments.get("sequence_parallel")) and topology.tensor_size > 1)
    rule = PieceRule(seq_length, alignment_of(topology), options.varlen_packing_long_documents)
    grid = grid_of(topology, _experts(arguments, "model") or 1, _experts(arguments, "tensor"))
    _check_bins(grid)
    if has_model and options.cost_ratio is None:
        sequence, source = _model_cost(options.balanced_pipeline_costs, job, device)
    else:
        sequence, source = _ratio_cost(options, assumed)
    shapes = VARIABLE if options.varlen_packing_shapes == "auto" else options.varlen_packing_shapes
    return Request(
        data=data,
        part=part,
        rule=rule,
        grid=grid,
        bin_cost=BinCost(sequence, seq_length, shapes),
        cost_source=source,
        in_seconds=has_model and options.cost_ratio is None,
        seed=options.seed,
        batches=options.batches,
        cache_folder=options.data_cache_path,
        assumed=tuple(assumed),
        ignored=(*line.ignored, *(["--split"] if options.split and options.train_data_path else [])),
    )


def _check_numbers(options: argparse.Namespace) -> None:
    for flag, value, most in (
        ("--batches", options.batches, _MOST_BINS),
        ("--num-microbatches", options.num_microbatches, _MOST_BINS),
        ("--data-parallel-size", options.data_parallel_size, _MOST_BINS),
        ("--world-size", options.world_size, _MOST_BINS**2),
    ):
        if value is not None and not 1 <= value <= most:
            raise BalanceError(f"{flag} {value}: give a number of 1 to {most}")
    if options.data_parallel_size is not None and options.world_size is not None:
        raise BalanceError("--data-parallel-size and --world-size both say how many replicas there are: leave one out")
    if not 0 <= options.seed < MOST_WHOLE:
        raise BalanceError(f"--seed {options.seed}: give a number of 0 to {MOST_WHOLE - 1}")
    ratio = options.cost_ratio
    if ratio is not None and not 0 <= ratio <= _MOST_RATIO:  # false for NaN
        raise BalanceError(
            f"--cost-ratio {ratio}: give the tokens A of cost = A * s + s^2, 0 or more and at most {_MOST_RATIO:.0e}; an 8B model"
            f" has about {DEFAULT_RATIO:.0f}"
        )


# --- words that are no flags


def _apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Data sets before the first flag, and the rest; a launcher and its script are no data sets."""
    if _is_launched(argv):
        return [], list(argv)
    flags = (place for place, word in enumerate(argv) if word.startswith("-") and number_in(word) is None)
    first = next(flags, len(argv))  # a negative weight is no flag
    return list(argv[:first]), list(argv[first:])


def _is_launched(argv: Sequence[str]) -> bool:
    return any(word.endswith(".py") for word in argv) or "-m" in argv


def _data(options: argparse.Namespace, prefixes: list[str]) -> tuple[str, ...]:
    given = {
        "PREFIX": prefixes,
        "--data-path": options.data_path,
        "--train-data-path": options.train_data_path,
        "--lengths": options.lengths,
    }
    given = {name: words for name, words in given.items() if words}
    if not given:
        raise BalanceError(
            "no data: name the Megatron data sets first (PREFIX ...), or give --data-path as training has it, or --lengths"
            " FILE.json|.csv|.npy"
        )
    if len(given) > 1:
        raise BalanceError(f"{' and '.join(given)} each name the data: leave all but one out")
    ((name, words),) = given.items()
    if name == "--lengths":
        for word in words:
            if not word.endswith(ENDINGS) and number_in(word) is None:
                raise BalanceError(f"--lengths {word}: its name must end in .json, .csv or .npy")
    return tuple(words)


def _part(options: argparse.Namespace, data: Sequence[str], assumed: list[str]) -> Part:
    """The documents that training would take: Megatron's own part of its data sets where the command line names none."""
    if options.train_data_path:
        return ALL
    if options.split is not None:
        return train_part(options.split)
    if all(is_named_so(word) for word in data if number_in(word) is None):
        return ALL
    assumed.append(f"--split {MEGATRONS_SPLIT} (Megatron's own)")
    return train_part(MEGATRONS_SPLIT)


def _read(words: Sequence[str]) -> CommandLine:
    try:
        line = read_command_line(words)
    except BalanceError as error:
        if "unrecognized arguments" in str(error) and "--" not in str(error):
            raise BalanceError(f"{error}: name data sets before the first flag, or after --data-path") from error
        raise
    if slips := [name for name in line.ignored if name.startswith(PACKING) and name not in _TRAINING_ONLY]:
        raise BalanceError(f"unrecognized arguments: {' '.join(slips)}")
    return line


# --- sizes


def _seq_length(arguments: Mapping[str, Any]) -> int:
    given = arguments.get("seq_length", arguments.get("encoder_seq_length"))
    if given is None:
        raise BalanceError("--seq-length is missing: the tokens that a bin holds")
    if given < 1:
        raise BalanceError(f"--seq-length {given}: must be 1 or more")
    return given


def _world_size(options: argparse.Namespace, line: CommandLine, assumed: list[str]) -> int:
    """Processes of the job, by whatever tells them; else of one replica."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    replica = math.prod(max(1, line.arguments.get(size) or 1) for size in sizes)
    if options.data_parallel_size is not None:
        return options.data_parallel_size * replica
    if (told := options.world_size or line.world_size) is not None:
        return told
    assumed.append("--data-parallel-size 1")
    return replica


def _num_microbatches(
    options: argparse.Namespace, arguments: Mapping[str, Any], world_size: int, assumed: list[str]
) -> int | None:
    """Micro-batches where no global batch tells them: as many as make a few hundred bins, in whole groups of VPP."""
    if options.num_microbatches is not None or arguments.get("global_batch_size") is not None:
        return options.num_microbatches
    plain = {name: value for name, value in arguments.items() if name.endswith(("parallel_size", "batch_size"))}
    sizes = topology_from_arguments(plain, 1, world_size)
    each = sizes.data_size * sizes.micro_batch_size
    group = arguments.get("microbatch_group_size_per_vp_stage") or sizes.pipeline_size
    num_microbatches = -(-_DEFAULT_BINS // (each * group)) * group
    assumed.append(f"--global-batch-size {num_microbatches * each}")
    return num_microbatches


def _experts(arguments: Mapping[str, Any], kind: str) -> int | None:
    size = arguments.get(f"expert_{kind}_parallel_size")
    if size is not None and size < 1:
        raise BalanceError(f"--expert-{kind}-parallel-size {size}: must be 1 or more")
    return size


def _check_bins(grid: Grid) -> None:
    if grid.num_bins > _MOST_BINS:
        raise BalanceError(f"--global-batch-size {grid.num_bins}: at most {_MOST_BINS} bins are planned")


# --- costs


def _ratio_cost(options: argparse.Namespace, assumed: list[str]) -> tuple[SequenceCost, str]:
    ratio = options.cost_ratio
    if ratio is None:
        ratio = DEFAULT_RATIO
        assumed.append(f"--cost-ratio {ratio:.0f} (an 8B model)")
    if options.balanced_pipeline_costs is not None or options.balanced_pipeline_device is not None:
        raise BalanceError(
            f"{FLAG}-costs and {FLAG}-device are of a model: give its flags or --hf-config, and leave --cost-ratio out"
        )
    return SequenceCost.of_ratio(ratio), f"{ratio:,.0f} * s + s^2 for s tokens"


def _model_cost(source: str | None, job: Job, device: Device | None) -> tuple[SequenceCost, str]:
    from megatron_balance.costs.analytic import analytic_table
    from megatron_balance.costs.table import load_fitting

    if source == PROFILE:
        raise BalanceError(
            f"pack measures nothing: run `megatron-balance profile --output costs.json ...`, then give {FLAG}-costs costs.json"
        )
    model = job.model
    if source in (None, ANALYTIC):
        device = device or device_chosen(_DEVICE)
        model = replace(model, fused_kernels=True)  # attention leaves out what is masked, also in local layers
        table = analytic_table(model, job.topology, device)
    elif device is not None:
        raise BalanceError(f"{FLAG}-device and {FLAG}-costs {source} both say what costs are of: leave one out")
    else:
        table = load_fitting(source, model, job.topology)
    return SequenceCost.of_table(table, model, job.topology, device), table.source
