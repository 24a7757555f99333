"""What was found about a job: what all reports show, and what is written as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_balance.diagnosis.result import WORKER, Diagnosis, Fix
from megatron_balance.diagnosis.trace import BACKWARD, FORWARD, Trace

LEAST_DARKEST = 1.1  # slowdown: workers that hardly differ look so


@dataclass(frozen=True, eq=False)
class Report:
    """A diagnosis beside the trace that it is of."""

    trace: Trace
    diagnosis: Diagnosis

    @property
    def name(self) -> str:
        """The job's name on one line, without characters that a terminal obeys."""
        return printable(self.trace.job.name) or "a job without a name"

    @property
    def sizes(self) -> str:
        """The job's size and how much of it was recorded, on one line."""
        job, sizes = self.trace.job, self.trace.job.topology
        virtual = f" VPP{sizes.virtual_size}" if sizes.virtual_size > 1 else ""
        steps = self.diagnosis.slowdown.steps.size
        return (
            f"DP{sizes.data_size} PP{sizes.pipeline_size}{virtual}, {sizes.num_microbatches} micro-batches, {job.world_size:,}"
            f" GPU{'s' * (job.world_size != 1)}, {steps} step{'s' * (steps != 1)}"
        )

    @property
    def headline(self) -> str:
        """The verdict as a sentence."""
        found, slowdown = self.diagnosis, self.diagnosis.slowdown.slowdown
        named = " and ".join(
            cause + (self._worker_named if cause == WORKER else "") for cause in map(printable, found.verdict)
        )
        return f"{named[:1].upper()}{named[1:]}: a step takes {slowdown:.3f} times what it would if nothing straggled"

    @property
    def darkest(self) -> float:
        """Slowdown that heat maps of the workers show in their darkest colour; the palest is 1."""
        return max(LEAST_DARKEST, float(np.nanmax(self.diagnosis.slowdown.by_worker)))

    @property
    def _worker_named(self) -> str:
        worker = self.diagnosis.worker
        return "" if worker is None else f" (DP rank {worker[0]}, PP rank {worker[1]})"

    @property
    def typical_step(self) -> int:
        """Number of the step whose slowdown is the median one's."""
        slowdown = self.diagnosis.slowdown
        ratio = slowdown.actual_s / slowdown.ideal_s
        return int(slowdown.steps[np.argsort(ratio, kind="stable")[(ratio.size - 1) // 2]])

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, replayed."""
        return float(self.diagnosis.slowdown.actual_s.mean())

    @property
    def tokens(self) -> float | None:
        """Mean real tokens of a step, where the trace tells those of all ranks."""
        sequences = self.trace.sequences
        if sequences is None or (sequences.tokens < 0).any():
            return None
        return float(sequences.tokens.sum() / sequences.tokens.shape[0])

    @cached_property
    def stage_s(self) -> np.ndarray:
        """Mean seconds of a micro-batch's forward and backward pass by stage, shape [2, stages]; NaN where there is none."""
        trace, sizes = self.trace, self.trace.job.topology
        stage = np.maximum(trace.chunk, 0).astype(np.int64) * sizes.pipeline_size + trace.pp_rank
        means = np.full((2, sizes.num_stages), np.nan)
        for row, name in enumerate((FORWARD, BACKWARD)):
            shown = trace.are(name) & (stage >= 0) & (stage < sizes.num_stages)
            count = np.bincount(stage[shown], minlength=sizes.num_stages)
            total_s = np.bincount(stage[shown], (trace.end_s - trace.start_s)[shown], sizes.num_stages)
            np.divide(total_s, count, out=means[row], where=count > 0)
        return means

    @property
    def unnamed(self) -> float:
        """Share of the slowdown that no cause accounts for."""
        return max(0.0, 1.0 - sum(self.diagnosis.causes.values()))

    def values(self) -> dict[str, Any]:
        """The report as JSON holds it.

        Keys: ``job`` (name and sizes), ``problems`` (what is missing or odd; what is said is then ``partial``); ``S``, ``S_t``
        (by kind of operation), ``S_w`` (rows: PP ranks, columns: DP ranks), ``S_stage``, ``S_dp`` (whole ranks), ``M_S``,
        ``M_W``; ``steps`` (number, seconds recorded, replayed and ideal); ``tokens`` (real ones, mean of a step); ``stages``
        (seconds of a micro-batch); ``causes`` (share of the slowdown), ``by_cause`` (the step over the step without it, all else
        as it was), ``verdict``, ``worker``; ``waste_gpu_hours``, ``waste_per_day_gpu_hours``; ``checklist``; ``fix`` (the best
        one or null) and ``fixes``. What cannot be measured is null.
        """
        trace, found, slowdown = self.trace, self.diagnosis, self.diagnosis.slowdown
        sizes = trace.job.topology
        forward_s, backward_s = self.stage_s.tolist()
        steps = zip(slowdown.steps, slowdown.recorded_s, slowdown.actual_s, slowdown.ideal_s, strict=True)
        fixes = [_fix_values(fix) for fix in found.fixes]
        return finite(
            {
                "job": {
                    "name": trace.job.name,
                    "world_size": trace.job.world_size,
                    "data_parallel_size": sizes.data_size,
                    "pipeline_size": sizes.pipeline_size,
                    "virtual_size": sizes.virtual_size,
                    "num_microbatches": sizes.num_microbatches,
                },
                "partial": bool(trace.problems),
                "problems": list(trace.problems),
                "S": slowdown.slowdown,
                "S_t": dict(slowdown.by_operation),
                "S_w": slowdown.by_worker.tolist(),
                "S_stage": slowdown.by_stage.tolist(),
                "S_dp": slowdown.by_dp_rank.tolist(),
                "M_S": slowdown.last_stage,
                "M_W": slowdown.slowest_workers,
                "steps": [
                    {"step": int(step), "recorded_s": recorded, "actual_s": actual, "ideal_s": ideal}
                    for step, recorded, actual, ideal in steps
                ],
                "tokens": self.tokens,
                "stages": {"forward_s": forward_s, "backward_s": backward_s},
                "causes": dict(found.causes),
                "by_cause": dict(found.by_cause),
                "verdict": list(found.verdict),
                "worker": None
                if found.worker is None
                else dict(zip(("dp_rank", "pp_rank"), found.worker, strict=True)),
                "waste_gpu_hours": found.waste_gpu_hours,
                "waste_per_day_gpu_hours": found.waste_per_day_gpu_hours,
                "checklist": [asdict(check) for check in found.checklist],
                "fix": fixes[0] if fixes else None,
                "fixes": fixes,
            }
        )


def _fix_values(fix: Fix) -> dict[str, Any]:
    return {**asdict(fix), "flags": list(fix.flags), "gain": fix.gain}


def finite(value: Any) -> Any:
    """``value`` as JSON may hold it: plain numbers, None for those that are none."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """``text`` on one line, with what a terminal or a reader's eye could be misled by (controls, bidirectional marks) as U+FFFD."""
    return "".join(each if each.isprintable() else "\ufffd" for each in str(text))


def ratio(number: float | None) -> str:
    """A slowdown."""
    return f"{number:.3f}" if number is not None and math.isfinite(number) else "-"


def hours(gpu_hours: float) -> str:
    """GPU-hours, without their unit."""
    return f"{gpu_hours:,.0f}" if gpu_hours >= 100 else f"{gpu_hours:.3g}" if math.isfinite(gpu_hours) else "-"
