"""The comparison: arithmetic, summary and table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

from rich.table import Table

from quickstart.observations import Step

UNIFORM, BALANCED = "uniform", "balanced"
NOISY = 1.15  # launches of the same split that differ more than this say little
TOLERANCE = 2e-6  # largest relative loss difference between equal computations in fp32 that rounding explains


@dataclass(frozen=True)
class Round:
    """One launch.

    Attributes:
        split: `UNIFORM` or `BALANCED`.
        layers: transformer layers of each stage.
        steps: all steps.
        warmup: how many of the first steps do not count in times.
    """

    split: str
    layers: tuple[int, ...]
    steps: tuple[Step, ...]
    warmup: int

    @property
    def measured(self) -> tuple[Step, ...]:
        return self.steps[self.warmup :]

    @property
    def step_s(self) -> float:
        return median(step.duration_s for step in self.measured)


@dataclass(frozen=True)
class Summary:
    """The result; `summary.json` holds these fields. Times are medians in seconds.

    Attributes:
        measured_speedup: ``uniform_step_s / balanced_step_s``.
        pair_speedups: the same for each pair of neighbouring launches.
        predicted_speedup: by the plan's simulation.
        launch_spread: slowest over fastest launch of the same split; 1 on a perfectly quiet machine.
        max_loss_difference: largest ``|balanced - uniform| / |uniform|`` of the same step of a pair.
        uniform_busy_s, balanced_busy_s: time that each stage computes in one step.
        rounds: every launch in its order.
    """

    uniform_split: tuple[int, ...]
    balanced_split: tuple[int, ...]
    uniform_step_s: float
    balanced_step_s: float
    measured_speedup: float
    pair_speedups: tuple[float, ...]
    predicted_speedup: float
    launch_spread: float
    max_loss_difference: float
    uniform_busy_s: tuple[float, ...]
    balanced_busy_s: tuple[float, ...]
    device: str
    rounds: tuple[dict, ...]

    @property
    def losses_agree(self) -> bool:
        return self.max_loss_difference <= TOLERANCE

    def to_json(self) -> dict:
        return asdict(self)


def order_of_rounds(pairs: int) -> list[str]:
    """Uniform, balanced, balanced, uniform, ...: a machine that gets slower or faster steadily favours neither."""
    order = []
    for pair in range(pairs):
        order += [UNIFORM, BALANCED] if pair % 2 == 0 else [BALANCED, UNIFORM]
    return order


def summarize(rounds: list[Round], predicted_speedup: float, device: str) -> Summary:
    """Compare ``rounds``, which come in pairs as `order_of_rounds` orders them."""
    pairs = [sorted(rounds[i : i + 2], key=lambda one: one.split, reverse=True) for i in range(0, len(rounds), 2)]
    uniform, balanced = ([pair[side] for pair in pairs] for side in (0, 1))
    uniform_s, balanced_s = _step_s(uniform), _step_s(balanced)
    return Summary(
        uniform_split=uniform[0].layers,
        balanced_split=balanced[0].layers,
        uniform_step_s=uniform_s,
        balanced_step_s=balanced_s,
        measured_speedup=uniform_s / balanced_s,
        pair_speedups=tuple(one.step_s / other.step_s for one, other in pairs),
        predicted_speedup=predicted_speedup,
        launch_spread=max(_spread(uniform), _spread(balanced)),
        max_loss_difference=max(loss_difference(one.steps, other.steps) for one, other in pairs),
        uniform_busy_s=_busy_s(uniform),
        balanced_busy_s=_busy_s(balanced),
        device=device,
        rounds=tuple(_round_data(one) for one in rounds),
    )


def loss_difference(reference: tuple[Step, ...], steps: tuple[Step, ...]) -> float:
    """Largest relative difference between the losses of the same steps."""
    return max(abs(b.loss - a.loss) / abs(a.loss) for a, b in zip(reference, steps, strict=True))


def typical_step(rounds: list[Round]) -> Step:
    """The measured step whose duration is nearest to the median."""
    typical_s = _step_s(rounds)
    return min((step for one in rounds for step in one.measured), key=lambda step: abs(step.duration_s - typical_s))


def _step_s(rounds: list[Round]) -> float:
    return median(step.duration_s for one in rounds for step in one.measured)


def _spread(rounds: list[Round]) -> float:
    seconds = [one.step_s for one in rounds]
    return max(seconds) / min(seconds)


def _busy_s(rounds: list[Round]) -> tuple[float, ...]:
    return tuple(median(stage) for stage in zip(*(step.busy_s for one in rounds for step in one.measured), strict=True))


def _round_data(one: Round) -> dict:
    return {
        "split": one.split,
        "layers": one.layers,
        "median_step_s": one.step_s,
        "step_s": [step.duration_s for step in one.steps],
        "warmup_steps": one.warmup,
        "busy_s": [step.busy_s for step in one.steps],
        "losses": [step.loss for step in one.steps],
    }


def table(summary: Summary) -> Table:
    """The result for a person."""
    result = Table(title="Uniform and balanced pipeline split", title_style="bold", title_justify="left")
    result.add_column("")
    result.add_column("uniform", justify="right")
    result.add_column("balanced", justify="right", style="green")
    result.add_row("layers of each stage", layers_text(summary.uniform_split), layers_text(summary.balanced_split))
    for stage, (uniform_s, balanced_s) in enumerate(zip(summary.uniform_busy_s, summary.balanced_busy_s, strict=True)):
        result.add_row(
            f"stage {stage} computes",
            _busy_text(uniform_s, summary.uniform_step_s),
            _busy_text(balanced_s, summary.balanced_step_s),
        )
    result.add_row("step time (median)", f"{summary.uniform_step_s:.3f} s", f"{summary.balanced_step_s:.3f} s")
    result.add_section()
    result.add_row("speed-up, simulated by the plan", "1", f"{summary.predicted_speedup:.3f}")
    result.add_row("speed-up, measured", "1", f"[bold]{summary.measured_speedup:.3f}[/bold]")
    result.add_row("  of each pair of launches", "", ", ".join(f"{one:.2f}" for one in summary.pair_speedups))
    result.add_row("largest relative loss difference", "", f"{summary.max_loss_difference:.1e}")
    return result


def layers_text(layers: tuple[int, ...]) -> str:
    return " | ".join(map(str, layers))


def _busy_text(busy_s: float, step_s: float) -> str:
    return f"{busy_s:.3f} s ({busy_s / step_s:4.0%})"
