"""`megatron-balance pack`: from the command line to what is printed and written.

Only what reads the command line is imported with this file: compiled code and pictures wait until it is known to be good.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.errors import BalanceError
from megatron_balance.files import check_place, write_standard_output, write_text
from megatron_balance.packing.cost import SHAPES
from megatron_balance.packing.pieces import LONG_DOCUMENTS, SPLIT
from megatron_balance.packing.splits import MEGATRONS_SPLIT
from megatron_balance.planning.flags import FLAG
from megatron_balance.plots import check_matplotlib

if TYPE_CHECKING:
    from megatron_balance.pack_command.report import Report
    from megatron_balance.pack_command.study import Study

_STDOUT = ""
_BATCHES = 16
_SEED = 1234  # Megatron's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; all others are Megatron's."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data-path",
        nargs="+",
        metavar="WORD",
        help="the data sets as training names them: prefixes, each with its weight before it or none (PREFIX ... in front of"
        " all flags is the same)",
    )
    data.add_argument(
        "--split",
        metavar="TRAIN,VALID,TEST",
        help=f"proportions of the documents, of which training's are packed (default: Megatron's, {MEGATRONS_SPLIT}; all of"
        " files of lengths)",
    )
    data.add_argument(
        "--train-data-path",
        nargs="+",
        metavar="WORD",
        help="data sets of training alone, all of whose documents are packed",
    )
    data.add_argument(
        "--lengths",
        nargs="+",
        metavar="FILE",
        help="files of documents' lengths in place of data sets: .json (a list), .csv or .npy, with weights or without",
    )
    data.add_argument(
        "--data-cache-path", metavar="DIR", help="keep orders of documents and tuned profiles here, as training does"
    )
    data.add_argument("--seed", type=int, default=_SEED, help="of the order of documents (default: %(default)s)")
    packing = parser.add_argument_group("packing")
    packing.add_argument("--varlen-packing", action="store_true", help=argparse.SUPPRESS)
    packing.add_argument(
        "--varlen-packing-shapes",
        choices=("auto", *SHAPES),
        default="auto",
        help="micro-batches padded to --seq-length, or of their true length (default: auto, which is variable; training takes"
        " fixed where something in the job needs it)",
    )
    packing.add_argument(
        "--varlen-packing-long-documents",
        choices=LONG_DOCUMENTS,
        default=SPLIT,
        help="what becomes of documents that no bin holds (default: %(default)s)",
    )
    job = parser.add_argument_group(
        "job, beside Megatron's flags (--seq-length, --global-batch-size in bins, sizes, model)"
    )
    job.add_argument("--data-parallel-size", type=int, metavar="DP", help="replicas of the model (default: 1)")
    job.add_argument("--world-size", type=int, metavar="N", help="processes of the job, in place of that")
    job.add_argument("--num-microbatches", type=int, metavar="M", help="of a step, in place of --global-batch-size")
    job.add_argument(
        "--hf-config",
        metavar="FILE",
        help="take the model from a Hugging Face config.json; Megatron's flags outrank it",
    )
    job.add_argument(
        f"{FLAG}-costs",
        metavar="analytic|FILE",
        help="estimates from data sheets (default), or a costs file that `megatron-balance profile` wrote",
    )
    job.add_argument(
        f"{FLAG}-device",
        metavar="NAME",
        help="whose speeds are taken: A100, H100, H200, B200, generic (a GPU; the default), cpu",
    )
    job.add_argument(
        "--cost-ratio",
        type=float,
        metavar="A",
        help="no model: a document of s tokens costs A * s + s^2 (default without a model: 49152, about an 8B one)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--batches",
        type=int,
        default=_BATCHES,
        metavar="N",
        help="global batches that are cut, placed and simulated (default: %(default)s)",
    )
    output.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write the report as JSON to FILE, which ends in .json, or to standard output and nothing else there",
    )
    output.add_argument("--plot", metavar="FILE.png", help="draw it (needs matplotlib)")
    output.add_argument(
        "--dump",
        metavar="FILE.json",
        help='write the N global batches: {"seq_length": C, "batches": [[rank][micro-batch][piece]]}, each piece [document,'
        " first token, end token]; several sequences in a micro-batch add a level, several data sets a number in front of the"
        ' document, counted in "data_sets"',
    )


def pack(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        options: the flags of `add_arguments`.
        argv: the rest of the command line: data sets, or a launcher and its script, and Megatron's flags.

    Raises:
        BalanceError: the user's mistake.
    """
    _check_files(options)
    from megatron_balance.pack_command.request import read_request

    request = read_request(options, argv)
    if request.ignored:
        ignored = " ".join(request.ignored)
        print(f"megatron-balance: without effect on packing: {ignored}", file=sys.stderr, flush=True)
    from megatron_balance.packing.documents import read_blend

    blend = read_blend(request.data, request.part)
    from megatron_balance.pack_command.study import study

    report, found = study(request, blend)
    _write_files(options, report, found)
    _show(options, report)
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Refuse names before anything is computed; a data set behind --json must not be taken for its FILE."""
    if options.json not in (None, _STDOUT) and not options.json.endswith(".json"):
        raise BalanceError(
            f"--json {options.json}: end the file's name in .json, or put --json before another flag for standard output"
        )
    if options.dump is not None and not options.dump.endswith(".json"):
        raise BalanceError(f"--dump {options.dump}: end the file's name in .json")
    if options.dump and options.json and os.path.realpath(options.dump) == os.path.realpath(options.json):
        raise BalanceError(f"--dump and --json both name {options.dump}: they are two files")
    if options.plot is not None:
        _check_picture(options.plot)
    for flag, path, begins in (
        ("--json", options.json, b'{\n  "documents"'),
        ("--dump", options.dump, b'{"seq_length"'),
        ("--plot", options.plot, b"\x89PNG"),
    ):
        if path:
            check_place(flag, Path(path), begins)


def _check_picture(path: str) -> None:
    if not path.endswith(".png"):
        raise BalanceError(f"--plot {path}: end the name in .png")
    check_matplotlib("--plot")


def _write_files(options: argparse.Namespace, report: Report, found: Study) -> None:
    if options.dump is not None:
        from megatron_balance.pack_command.dump import dump_text

        write_text(options.dump, dump_text(found), f"the batches {options.dump}")
    if options.plot is not None:
        from megatron_balance.pack_command.picture import picture

        write_text(options.plot, picture(report, found), f"the picture {options.plot}")


def _show(options: argparse.Namespace, report: Report) -> None:
    text = "" if options.json is None else json.dumps(report.values(), indent=2, allow_nan=False) + "\n"
    if options.json == _STDOUT:
        write_standard_output(text)
        return
    if text:
        write_text(options.json, text, f"the report {options.json}")
    from megatron_balance.pack_command.text import render_report

    write_standard_output(render_report(report) + "\n")
