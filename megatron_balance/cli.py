"""The `megatron-balance` command."""

from __future__ import annotations

import argparse
import sys

from megatron_balance import __version__
from megatron_balance.diagnose_command.command import add_arguments as add_diagnose_arguments
from megatron_balance.diagnose_command.command import diagnose as diagnose_command
from megatron_balance.errors import BalanceError
from megatron_balance.pack_command.command import add_arguments as add_pack_arguments
from megatron_balance.pack_command.command import pack as pack_command
from megatron_balance.planning.command import add_arguments as add_plan_arguments
from megatron_balance.planning.command import plan as plan_command


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2 for a user's mistake)."""
    parser = _parser()
    options, job = parser.parse_known_args(argv)
    if job and options.command not in (_plan, _pack, _profile):
        parser.error(f"unrecognized arguments: {' '.join(job)}")
    try:
        return options.command(options, job)
    except BalanceError as error:
        print(f"megatron-balance: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemError as error:  # what Numba makes of an interruption of compiled code
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-balance", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="what was found of the installed Megatron",
        description="Show which functions of Megatron our flags need and whether this Megatron has them. Exits with 1 where"
        " one is missing.",
    )
    doctor.add_argument(
        "--megatron-path", metavar="DIR", help="a Megatron-LM checkout (default: the installed megatron-core)"
    )
    doctor.set_defaults(command=_doctor)
    plan = commands.add_parser(
        "plan",
        help="the best layout of a job, without GPUs",
        allow_abbrev=False,
        usage="%(prog)s [-h] [FLAGS] [SCRIPT] MEGATRON'S FLAGS",
        description="Plan the pipeline of the job that a Megatron command line describes, without GPUs and without torch: the best"
        " layout, what it gives beside Megatron's own splits, and what limits it.",
        epilog="The times are simulated on the costs given: estimates, unless there is a costs file.",
    )
    add_plan_arguments(plan)
    plan.set_defaults(command=_plan)
    pack = commands.add_parser(
        "pack",
        help="what packing documents of different lengths would do for a data set, without GPUs",
        allow_abbrev=False,
        usage="%(prog)s [PREFIX ... | SCRIPT] --seq-length C [FLAGS] [MEGATRON'S FLAGS]",
        description="Pack documents into bins of --seq-length tokens and place them on the ranks and micro-batches of each step,"
        " without GPUs, without torch and without reading a token; show what that gives beside stock Megatron's concatenated"
        " and chopped documents. PREFIX is a Megatron data set (PREFIX.idx and PREFIX.bin), alone or behind its weight.",
        epilog="Steps are simulated on the costs given, with equal stages and without communication. --global-batch-size counts"
        " bins.",
    )
    add_pack_arguments(pack)
    pack.set_defaults(command=_pack)
    diagnose = commands.add_parser(
        "diagnose",
        help="what held a recorded job up, how much that costs, and what to do",
        allow_abbrev=False,
        usage="%(prog)s TRACE [--meta FILE.yaml] [--layers N,N,...] [FLAGS]\n       %(prog)s --before A --after B [FLAGS]",
        description="Replay a recorded job with and without its stragglers, without GPUs and without torch: how much slower it is"
        " than one in which nothing straggles, how much of that goes with the stage split, sequence lengths, one worker, garbage"
        " collection and communication, by which symptoms, and the fix with its predicted gain.",
        epilog="An ideal step gives every operation the mean duration of its kind (communication: the median).",
    )
    add_diagnose_arguments(diagnose)
    diagnose.set_defaults(command=_diagnose)
    profile = commands.add_parser(
        "profile",
        help="measure what embedding, layers and head of a job cost here, and write a costs file",
        allow_abbrev=False,
        usage="%(prog)s [-h] --output FILE [--device auto|cpu|cuda] [SCRIPT] MEGATRON'S FLAGS",
        description="Measure what embedding, layers and head take forward and backward, and the optimizer, for one rank of any"
        " tensor-parallel size in a single process, on the model that the flags of a training job describe. SCRIPT is the"
        " job's training script (default: our own).",
        epilog="The file is for --balanced-pipeline-costs. Pipeline size, numbers of layers and micro-batches do not matter to"
        " it; paths to data and checkpoints are not used.",
    )
    profile.add_argument("--output", required=True, metavar="FILE", help="where the costs are written (JSON)")
    profile.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU where there is one"
    )
    profile.set_defaults(command=_profile)
    return parser


def _doctor(options: argparse.Namespace, _: list[str]) -> int:
    from megatron_balance.megatron.doctor import examine

    return examine(options.megatron_path)


def _plan(options: argparse.Namespace, job: list[str]) -> int:
    return plan_command(options, job)


def _pack(options: argparse.Namespace, job: list[str]) -> int:
    return pack_command(options, job)


def _diagnose(options: argparse.Namespace, _: list[str]) -> int:
    return diagnose_command(options)


def _profile(options: argparse.Namespace, job: list[str]) -> int:
    from megatron_balance.megatron.measuring.by_hand import profile

    profile(options.output, options.device, job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
