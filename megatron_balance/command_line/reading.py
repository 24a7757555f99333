"""From the words of a command line to values, without Megatron."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_balance.command_line.flags import FLAGS, MOST_LAYERS
from megatron_balance.errors import BalanceError
from megatron_balance.reading import MOST_WHOLE

_OURS = "--balanced-pipeline"

# Flags that leave the job to something that is not read here.
_REFUSED = {
    "--yaml-cfg": "takes the job from a YAML file, which is not read here: give its settings as Megatron's flags",
    "--config": "is not read here: give its settings as Megatron's flags",
    "--config-file": "is not read here: give its settings as Megatron's flags",
    "--use-checkpoint-args": "takes the model from a checkpoint, which is not read here: leave it out and give the model's"
    " flags",
    "--batch-size": "is no longer valid in Megatron: give --micro-batch-size",
    "--model-parallel-size": "is no longer valid in Megatron: give --tensor-model-parallel-size",
    "--checkpoint-activations": "is no longer valid in Megatron: give --recompute-activations, or --recompute-granularity and"
    " --recompute-method",
}


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes:
        arguments: what it gives, by Megatron's argument names, and by ours for our flags; what it leaves out is missing, and
            Megatron would take it from ``DEFAULTS``.
        ignored: flags that do not matter to a plan, in order, each once.
        world_size: processes that its launcher starts; None where that is not said.
    """

    arguments: dict[str, Any]
    ignored: tuple[str, ...] = ()
    world_size: int | None = None


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read the command line of a training job, as its user types it.

    Environment assignments, launcher and script before the flags are passed over; of them only the number of processes is
    taken (``WORLD_SIZE=``, torchrun's ``--nproc-per-node`` and ``--nnodes``). A flag that is not in the table is passed over
    with all words up to the next flag.

    Raises:
        BalanceError: a value is missing, or not what its flag takes; a word belongs to no flag; or the job is described
            elsewhere, in a YAML file or a checkpoint.
    """
    parser = _parser(any(_is_ours(word) for word in argv))
    launcher, words = _split(argv, parser.names)
    known, ignored = _set_apart(words, parser.names)
    arguments = vars(parser.parse_args(known))
    _check_sizes(arguments)
    if arguments.get("bf16") and arguments.get("fp16"):
        raise BalanceError("--bf16 and --fp16 exclude each other: leave one out")
    return CommandLine(arguments, tuple(dict.fromkeys(ignored)), _world_size(launcher))


class _Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise BalanceError(message)

    @property
    def names(self) -> frozenset[str]:
        """All flags that it reads."""
        return frozenset(self._option_string_actions)


def _parser(with_ours: bool) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        flag.add_to(parser)
    if with_ours:  # defined once, for Megatron's parser
        from megatron_balance.megatron.arguments import add_arguments

        add_arguments(parser)
        for action in parser._actions:
            action.default = argparse.SUPPRESS
    return parser


def _is_ours(word: str) -> bool:
    return word.startswith(_OURS)


def _name(word: str) -> str:
    return word.split("=")[0]


def _is_flag(word: str) -> bool:
    """Whether argparse takes ``word`` for a flag, known or not, and not for a value."""
    return len(word) > 1 and word.startswith("-") and " " not in _name(word) and not _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _split(argv: Sequence[str], names: frozenset[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher with its script, and what follows it.

    The launcher ends with the first ``.py`` before any of the job's flags; without one with the last ``-m MODULE``, or
    where the flags begin. A command line that begins with a flag has no launcher.
    """
    if argv and argv[0].startswith("--"):
        return argv[:0], argv
    first = next((index for index, word in enumerate(argv) if _name(word) in names), len(argv))
    scripts = [index + 1 for index in range(first) if argv[index].endswith(".py") and not _is_flag(argv[index])]
    modules = [index + 2 for index in range(first) if argv[index] == "-m"]
    flags = [index for index, word in enumerate(argv) if _is_flag(word)]
    end = next(iter(scripts or modules[-1:] or flags), len(argv))
    return argv[:end], argv[end:]


def _set_apart(words: Sequence[str], names: frozenset[str]) -> tuple[list[str], list[str]]:
    """The words of flags in the table, and the names of the other flags."""
    known: list[str] = []
    ignored: list[str] = []
    skipping = False
    for word in words:
        name = _name(word)
        if name in _REFUSED:
            raise BalanceError(f"{name} {_REFUSED[name]}")
        if _is_flag(word):
            skipping = name not in names
            if skipping and _is_ours(name):  # as in training; a slip must not plan something else
                raise BalanceError(f"unrecognized arguments: {name}")
            if skipping:
                ignored.append(name)
        if not skipping:
            known.append(word)
    return known, ignored


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        if any(type(number) is int and abs(number) >= MOST_WHOLE for number in values):
            raise BalanceError(f"--{name.replace('_', '-')} {value}: no such number is possible")
    for name in ("num_layers", "encoder_num_layers", "mtp_num_layers"):
        if arguments.get(name, 0) > MOST_LAYERS:
            raise BalanceError(
                f"--{name.replace('_', '-')} {arguments[name]}: at most {MOST_LAYERS} are planned, give fewer"
            )


_PROCESSES = re.compile(r"--nproc[-_]per[-_]node")
_NODES = re.compile(r"--nnodes")
_COUNT = re.compile(r"[0-9]{1,15}")  # what else torchrun takes, as gpu or 1:4, is no number of processes


def _world_size(launcher: Sequence[str]) -> int | None:
    """Processes of all nodes; one node where torchrun is not told how many, as it takes it."""
    for word in launcher:
        name, _, size = word.partition("=")
        if name == "WORLD_SIZE" and _COUNT.fullmatch(size):
            return int(size)
    processes, nodes = _launcher_value(launcher, _PROCESSES) or "", _launcher_value(launcher, _NODES) or "1"
    return int(processes) * int(nodes) if _COUNT.fullmatch(processes) and _COUNT.fullmatch(nodes) else None


def _launcher_value(launcher: Sequence[str], name: re.Pattern[str]) -> str | None:
    for word, following in zip(launcher, [*launcher, ""][1:], strict=True):
        flag, separator, value = word.partition("=")
        if name.fullmatch(flag):
            return value if separator else following
    return None
