"""The comparison: arithmetic, summary and table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median, quantiles

import numpy as np
from rich.table import Table

from megatron_balance.pipeline.plan import Plan
from quickstart.observations import Step

UNIFORM, BALANCED = "uniform", "balanced"
NOISY = 1.25  # turns of the same split of which the middle half differs more than this say little
TOLERANCE = 2e-6  # largest relative loss difference between equal computations in fp32 that rounding explains


@dataclass(frozen=True)
class Round:
    """One turn: a step of one split.

    Attributes:
        split: `UNIFORM` or `BALANCED`.
        layers: transformer layers that each stage was built with.
        step: what was seen.
    """

    split: str
    layers: tuple[int, ...]
    step: Step


@dataclass(frozen=True)
class Summary:
    """The result; `summary.json` holds these fields. Times are medians in seconds.

    Attributes:
        pair_speedups: uniform over balanced step time of each pair of neighbouring turns.
        measured_speedup: their median. A disturbance that lasts for some turns slows both steps of a pair, but moves the
            medians of the two splits apart when it meets one of them more often.
        predicted_speedup: ``predicted_uniform_step_s / predicted_balanced_step_s``, from the plan, made before training.
        prediction_over_measured: ``predicted_speedup / measured_speedup``.
        turn_spread: third over first quartile of the step times of a split; 1 on a perfectly quiet machine.
        max_loss_difference: largest ``|balanced - uniform| / |uniform|`` of the same step of a pair; NaN where a loss is.
        uniform_busy_s, balanced_busy_s: time that each stage computes in one step.
        rounds: every turn that counts, in its order.
    """

    uniform_split: tuple[int, ...]
    balanced_split: tuple[int, ...]
    uniform_step_s: float
    balanced_step_s: float
    pair_speedups: tuple[float, ...]
    measured_speedup: float
    predicted_uniform_step_s: float
    predicted_balanced_step_s: float
    predicted_speedup: float
    prediction_over_measured: float
    costs_source: str
    turn_spread: float
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


def counted(rounds: list[Round], warmup: int) -> list[Round]:
    """Those of ``rounds`` whose times count: not the first ``warmup`` pairs, nor the last one."""
    return rounds[2 * warmup : -2]


def summarize(rounds: list[Round], warmup: int, plan: Plan, device: str) -> Summary:
    """Compare ``rounds``, which come in pairs as `order_of_turns` orders them; the losses of all, the times of those `counted`."""
    predicted_speedup = plan.uniform_step_s / plan.step_s
    every_pair, pairs = _pairs(rounds), _pairs(counted(rounds, warmup))
    uniform, balanced = ([pair[side] for pair in pairs] for side in (0, 1))
    pair_speedups = tuple(one.step.duration_s / other.step.duration_s for one, other in pairs)
    return Summary(
        uniform_split=uniform[0].layers,
        balanced_split=balanced[0].layers,
        uniform_step_s=_step_s(uniform),
        balanced_step_s=_step_s(balanced),
        pair_speedups=pair_speedups,
        measured_speedup=median(pair_speedups),
        predicted_uniform_step_s=plan.uniform_step_s,
        predicted_balanced_step_s=plan.step_s,
        predicted_speedup=predicted_speedup,
        prediction_over_measured=predicted_speedup / median(pair_speedups),
        costs_source=plan.costs_source,
        turn_spread=max(_spread(uniform), _spread(balanced)),
        max_loss_difference=float(np.max([loss_difference(one.step, other.step) for one, other in every_pair])),
        uniform_busy_s=_busy_s(uniform),
        balanced_busy_s=_busy_s(balanced),
        device=device,
        rounds=tuple(_round_data(one) for one in counted(rounds, warmup)),
    )


def _pairs(rounds: list[Round]) -> list[list[Round]]:
    """Neighbours, the uniform one first."""
    return [sorted(rounds[i : i + 2], key=lambda one: one.split, reverse=True) for i in range(0, len(rounds), 2)]


def loss_difference(reference: Step, step: Step) -> float:
    """Relative difference between the losses of the same step of two splits."""
    return abs(step.loss - reference.loss) / abs(reference.loss)


def typical_step(rounds: list[Round]) -> Step:
    """The step whose duration is nearest to the median."""
    typical_s = _step_s(rounds)
    return min((one.step for one in rounds), key=lambda step: abs(step.duration_s - typical_s))


def _step_s(rounds: list[Round]) -> float:
    return median(one.step.duration_s for one in rounds)


def _spread(rounds: list[Round]) -> float:
    if len(rounds) == 1:
        return 1.0
    first, _, third = quantiles((one.step.duration_s for one in rounds), n=4, method="inclusive")
    return third / first


def _busy_s(rounds: list[Round]) -> tuple[float, ...]:
    return tuple(median(stage) for stage in zip(*(one.step.busy_s for one in rounds), strict=True))


def _round_data(one: Round) -> dict:
    return {
        "split": one.split,
        "layers": one.layers,
        "step_s": one.step.duration_s,
        "busy_s": one.step.busy_s,
        "loss": one.step.loss,
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
    result.add_section()
    predicted = (summary.predicted_uniform_step_s, summary.predicted_balanced_step_s)
    result.add_row("step time, predicted before training", *(f"{step_s:.3f} s" for step_s in predicted))
    measured = (summary.uniform_step_s, summary.balanced_step_s)
    result.add_row("step time, measured (median)", *(f"{step_s:.3f} s" for step_s in measured))
    result.add_row("speed-up, predicted before training", "1", f"{summary.predicted_speedup:.3f}")
    result.add_row("speed-up, measured (median of pairs of steps)", "1", f"[bold]{summary.measured_speedup:.3f}[/bold]")
    result.add_row("  prediction over measurement", "", f"{summary.prediction_over_measured:.3f}")
    pairs = summary.pair_speedups
    result.add_row(f"  least and most of {len(pairs)} pairs of steps", "", f"{min(pairs):.2f} ... {max(pairs):.2f}")
    result.add_row("largest relative loss difference", "", f"{summary.max_loss_difference:.1e}")
    return result


def layers_text(layers: tuple[int, ...]) -> str:
    return " | ".join(map(str, layers))


def _busy_text(busy_s: float, step_s: float) -> str:
    return f"{busy_s:.3f} s ({busy_s / step_s:4.0%})"
