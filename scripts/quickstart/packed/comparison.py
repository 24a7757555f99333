"""Stock inter-document masking against packing: trained in turns, shown beside what the simulator says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megatron_balance.megatron.measuring.launch import measure
from quickstart.packed.figures import Gain, Median, Predictor, read_side
from quickstart.packed.jobs import PACKED, STOCK, Launcher
from quickstart.proof import Proof
from quickstart.turns import order_of_turns

ROWS = (
    "model, vocabulary",
    "a step",
    "step over one without waiting, simulated: stock, packed",
    "places of the bins that hold a label, packed",
    "work a label, packed over stock, simulated",
    "the loader's share of the step: stock, packed",
    "seconds a step: stock, packed (medians)",
    "labels a second, packed over stock: predicted",
    "measured (median of pairs of steps)",
    "95 % (pairs)",
    "prediction off by",
    "in all steps together: predicted, measured",
)


def compare(launcher: Launcher, data: Path, progress: Callable[[str], None], stock: str = STOCK) -> Gain:
    """Measure costs, then train packed and ``stock`` on ``data``, the prefix of an indexed dataset.

    Raises:
        LaunchFailed, MeasurementFailed: a job, or the measurement, ended with an error.
    """
    case = launcher.case
    progress("measuring costs")
    table = measure(launcher.script, case.flags(PACKED), launcher.device, case.data)
    launcher.compare(data, order_of_turns(stock, PACKED, case.steps), progress)
    sides = (read_side(launcher.seen / side, case, Predictor.of(case, table, side)) for side in (stock, PACKED))
    return Gain(case, *sides)


def column(gain: Gain) -> tuple[str, ...]:
    """Cells beside ``ROWS``."""
    case, stock, packed = gain.case, gain.stock, gain.packed
    return (
        f"{case.layers} layers of {case.hidden}, {case.vocabulary} tokens",
        f"{case.data * case.microbatches} bins of {case.sequence}",
        f"{stock.waiting:.3f}, {packed.waiting:.3f}",
        f"{gain.fill:.1%}",
        f"{gain.work:.3f}",
        f"{stock.loader_share:.2%}, {packed.loader_share:.2%}",
        f"{_seconds(stock.step_s)}, {_seconds(packed.step_s)}",
        f"{gain.predicted:.3f}",
        f"{gain.measured.value:.3f}",
        f"{gain.measured.interval(3)} ({case.pairs})",
        f"{gain.off:+.1%}",
        f"{gain.predicted_in_all:.3f}, {gain.measured_in_all:.3f}",
    )


def _seconds(values: Sequence[float]) -> str:
    return f"{Median.of(values).value:.2f}"


@dataclass(frozen=True)
class Summary:
    """The quickstart's packed round; ``summary.json`` holds these fields. Speed-ups are of tokens learned a second.

    Attributes:
        stock_step_s, packed_step_s: means, as steps differ in their documents.
        predicted_speedup: what the diagnosis of the stock job promises.
        measured_speedup: in all steps together.
        prediction_over_measured: the one over the other.
        pairs: steps of each side that count.
    """

    stock_step_s: float
    packed_step_s: float
    predicted_speedup: float
    measured_speedup: float
    prediction_over_measured: float
    pairs: int

    @classmethod
    def of(cls, proof: Proof, pairs: int) -> Summary:
        stock_s, packed_s = (
            float(report.diagnosis.slowdown.recorded_s.mean()) for report in (proof.before, proof.after)
        )
        return cls(stock_s, packed_s, proof.predicted, proof.measured, proof.predicted / proof.measured, pairs)


def table(summary: Summary) -> Table:
    """The result for a person."""
    result = Table(title="Long and short documents, on two ranks", title_style="bold", title_justify="left")
    result.add_column("")
    result.add_column("chopped (stock)", justify="right")
    result.add_column("packed", justify="right", style="green")
    result.add_row(
        f"step time, measured (mean of {summary.pairs})",
        f"{summary.stock_step_s:.3f} s",
        f"{summary.packed_step_s:.3f} s",
    )
    result.add_section()
    result.add_row("tokens learned a second, predicted", "1", f"{summary.predicted_speedup:.3f}")
    result.add_row("tokens learned a second, measured", "1", f"[bold]{summary.measured_speedup:.3f}[/bold]")
    result.add_row("  prediction over measurement", "", f"{summary.prediction_over_measured:.3f}")
    return result
