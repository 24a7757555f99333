#!/usr/bin/env python3
"""How good the planner's splits are: published models and layouts, the best figures known, and other frameworks' rules.

Everything is simulated on FLOPs (``split_models.py``), without communication; figures are the step over that of a perfectly
even split under the same schedule. A real job's whole step is taken from its public trace (``split_trace.py``; needs the extra
``trace`` and ``MEGATRON_BALANCE_DATA``, by default ``../shared/data``); without it these rows are left out, and said so.
Exits with 1 if some figure is not reached.

    python scripts/bench/split.py [--only TEXT] [--markdown]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # run from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from split_cases import NEAR_EQUAL, RULES, TOLERANCE, Case, PeerRow, cases, even_s, peer_rows, step_s  # noqa: E402
from split_trace import RECORDED, read_split  # noqa: E402
from tables import print_table  # noqa: E402

from megatron_balance.costs.chain import ElementCost  # noqa: E402
from megatron_balance.diagnosis.costs import RecordedSplit  # noqa: E402
from megatron_balance.errors import BalanceError  # noqa: E402
from megatron_balance.pipeline.layout import Layout  # noqa: E402
from megatron_balance.pipeline.memory import MemoryLimit, rank_peaks  # noqa: E402
from megatron_balance.pipeline.search import Split, find_split  # noqa: E402
from megatron_balance.schedule.simulate import Simulator  # noqa: E402

HEADINGS = ("case", "reference", "its figure", "best known", "ours", "bound", "proven", "CPU s", "")


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
        case: the case.
        split: what the search found; None where it could not be asked.
        reference_s, split_s: simulated seconds of a step.
        search_s: CPU seconds of the search, bound included.
        remark: what is wrong; empty if nothing.
    """

    case: Case
    split: Split | None
    reference_s: float | None
    split_s: float | None
    search_s: float
    remark: str

    def row(self) -> tuple[str, ...]:
        """Cells under ``HEADINGS``."""
        case = self.case
        known = "" if self.reference_s is None or case.gain else _ratio(self.reference_s / case.even_s)
        target = _figure(case, case.target)
        if self.split is None:
            return (case.name, case.reference_name, known, target, "", "", "", "", self.remark)
        return (
            case.name,
            case.reference_name,
            known,
            target,
            _figure(case, case.figure(self.split_s, self.reference_s)),
            _figure(case, case.figure(self.split.bound_s, self.reference_s)),
            "yes" if self.split.proven else "",
            f"{self.search_s:.2f}",
            self.remark,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    trace, absent = _trace_or_reason()
    chosen = [case for case in cases(trace) if options.only.lower() in case.name.lower()]
    peers = [row for row in peer_rows() if options.only.lower() in row.name.lower()]
    if not chosen and not peers:
        print(f"no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    _warm_up()
    results = [_run(case, show_layers=not options.markdown) for case in chosen]
    peer_cells = [_peer_cells(row) for row in peers]
    if results:
        rows = [result.row() for result in results]
        columns = len(HEADINGS) if any(row[-1] for row in rows) else len(HEADINGS) - 1
        print_table(HEADINGS[:columns], [row[:columns] for row in rows])
    if peers:
        print()
        print_table(("model, ranks", *RULES, "best known", "ours"), peer_cells)
    print("\n" + _no_gain(results, peers, peer_cells))
    if whole := [result for result in results if result.case.rest_s]:
        print("\n" + _rest(trace, whole))
    if absent is not None:
        print(f"\nLeft out, the whole step of the ST trace: {absent}")
    missed = sum(bool(result.remark) for result in results) + sum("!" in "".join(cells) for cells in peer_cells)
    verdict = f"{missed} of {len(results) + len(peers)} rows are not as they should be" if missed else "all reached"
    print(f"\n{verdict}", file=sys.stderr if options.markdown else sys.stdout)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that have TEXT in their name")
    parser.add_argument(
        "--markdown", action="store_true", help="the tables alone and where nothing is gained, for the README"
    )
    return parser


def _trace_or_reason() -> tuple[RecordedSplit | None, str | None]:
    """The trace of a real job, or why there is none."""
    try:
        return read_split(), None
    except BalanceError as error:
        return None, str(error)


def _run(case: Case, show_layers: bool) -> Result:
    """Search the case's split and judge it."""
    simulator = Simulator(case.topology)
    reference_s = None
    if case.reference is not None:
        reference_s = step_s(case.costs, simulator, case.reference.layers, case.reference_mtp_stage)
        if (remark := _reference_remark(case, reference_s)) is not None:
            return Result(case, None, reference_s, None, 0.0, remark)
    limit = None
    if case.memory is not None:
        limit = MemoryLimit(case.memory, float(_peaks(case, case.reference.layers, case.reference_mtp_stage).max()))
    started = time.process_time()
    try:
        split = find_split(
            case.costs,
            simulator,
            memory=limit,
            allow_empty=case.allow_empty,
            mtp_stages=case.mtp_stages,
            starts=() if case.reference is None else (case.reference.layers,),
        )
    except BalanceError as error:
        return Result(case, None, reference_s, None, 0.0, f"refused: {error}")
    search_s = time.process_time() - started
    split_s = step_s(case.costs, simulator, split.layers, split.mtp_stage)
    if show_layers:
        print(f"{case.name}: {' '.join(map(str, split.layers))}, MTP in stage {split.mtp_stage}", flush=True)
    remarks = list(_remarks(case, split, split_s, reference_s, limit))
    return Result(case, split, reference_s, split_s, search_s, "; ".join(remarks))


def _reference_remark(case: Case, reference_s: float) -> str | None:
    """Says so where the reference does not take what was published, as then the costs are others."""
    ours = reference_s / case.even_s
    if case.published_reference is None or abs(ours - case.published_reference) <= TOLERANCE:
        return None
    return f"reference published as {case.published_reference:.4f}"


def _remarks(
    case: Case, split: Split, split_s: float, reference_s: float | None, limit: MemoryLimit | None
) -> Iterator[str]:
    if not case.reached(split_s, reference_s):
        yield "NOT REACHED"
    if Layout.of(split.layers, int(case.costs.mtp.total_s > 0), split.mtp_stage).empty_ranks(
        case.topology.pipeline_size
    ):
        yield "A RANK WITHOUT LAYERS"
    if split.bound_s > split_s * (1 + 1e-9):
        yield "BOUND ABOVE THE STEP"
    if case.proven and not split.proven:
        yield "NOT PROVEN"
    if limit is not None and _peaks(case, split.layers, split.mtp_stage).max() > limit.limit_bytes * (1 + 1e-9):
        yield "OVER THE MEMORY"


def _peaks(case: Case, layers: tuple[int, ...], mtp_stage: int | None) -> np.ndarray:
    return rank_peaks(case.memory, case.topology, layers, mtp_stage)


def _peer_cells(row: PeerRow) -> tuple[str, ...]:
    """A row of the second table; a figure that is not what was published has a ``!``."""
    costs, simulator, even = row.costs, Simulator(row.topology), even_s(row.costs, row.topology)
    cells = []
    for layers, published in zip(row.splits(), row.published, strict=True):
        ours = None if layers is None else step_s(costs, simulator, layers) / even
        cell = "refuses" if ours is None else f"{ours:.3f}"
        same = ours is published is None or (None not in (ours, published) and abs(ours - published) <= TOLERANCE)
        cells.append(cell if same else f"{cell} (published {published}) !")
    ours = step_s(costs, simulator, find_split(costs, simulator).layers) / even
    reached = "" if ours <= row.best + TOLERANCE else " !"
    return (row.name, *cells, f"{row.best:.3f}", f"{ours:.3f}{reached}")


def _no_gain(results: Sequence[Result], peers: Sequence[PeerRow], peer_cells: Sequence[tuple[str, ...]]) -> str:
    """Says where the planner's split is no faster than what it is compared with."""
    equal = [
        f"{result.case.name} ({result.case.reference_name})"
        for result in results
        if result.split_s is not None
        and result.reference_s is not None
        and result.split_s > result.reference_s * (1 - NEAR_EQUAL)
    ]
    for row, cells in zip(peers, peer_cells, strict=True):
        same = [rule for rule, cell in zip(RULES, cells[1:], strict=False) if cell.split()[0] == cells[-1].split()[0]]
        equal += [f"{row.name} ({', '.join(same)})"] if same else []
    return f"No faster than what it is compared with: {'; '.join(equal) or 'nowhere'}."


def _rest(trace: RecordedSplit, results: Sequence[Result]) -> str:
    """What the trace's step is made of, and the least that our splits gain on it: where the rest grows with the layers."""
    layer, head = trace.costs.mean_layer, trace.costs.head
    least = [
        _figure(
            result.case, trace.step_with_s(RECORDED) / (result.split_s + trace.grown_rest_s(result.split.layers)) - 1
        )
        for result in results
        if result.split is not None
    ]
    return (
        f"ST trace: a layer takes {_both_ms(layer)}, the head {_both_ms(head)}; of the median step of"
        f" {1e3 * trace.step_s:.0f} ms the recorded split's pipeline is {1e3 * trace.simulated_s(RECORDED):.0f} ms, the rest"
        f" {1e3 * trace.rest_s:.0f} ms. If all-gather, reduce-scatter and optimizer went by a rank's layers alone, whole steps"
        f" would gain {' and '.join(least)}."
    )


def _both_ms(cost: ElementCost) -> str:
    return f"{1e3 * cost.forward_s:.2f} + {1e3 * cost.backward_s:.2f} ms"


def _warm_up() -> None:
    """Have the kernels compiled before anything is timed."""
    costs = peer_rows()[0].costs
    find_split(costs, Simulator(peer_rows()[0].topology))


def _figure(case: Case, figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{100 * figure:+.1f} %" if case.gain else _ratio(figure)


def _ratio(figure: float) -> str:
    return f"{figure:.4f}"


if __name__ == "__main__":
    sys.exit(main())
