"""A plan with all that was found about it: what is printed, and what is written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_balance.pipeline.plan import Plan
from megatron_balance.planning.job import Job
from megatron_balance.planning.planner import Planned
from megatron_balance.planning.study import Alternative, HeadScale


@dataclass(frozen=True)
class Report:
    """What `megatron-balance plan` found.

    Attributes:
        job: what was asked.
        head_s: seconds of the head for one micro-batch, both ways.
        planned: the plan, and what more memory would buy.
        alternatives: other splits, in the order in which they are shown.
        rival: the fastest of those that Megatron's flags give; None where none is usable.
        sensitivity: how the plan does beside ``rival`` if the head costs something else.
    """

    job: Job
    head_s: float
    planned: Planned
    alternatives: tuple[Alternative, ...]
    rival: Alternative | None
    sensitivity: tuple[HeadScale, ...]

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def layout(self) -> str:
        """For Megatron: the layout string, or a hybrid model's pattern."""
        return self.job.layout_text(self.plan.split)

    def over_even(self, step_s: float | None) -> float | None:
        """A step over that of a perfectly even split of the same work under the same schedule."""
        return None if step_s is None else step_s / self.plan.even_step_s

    def values(self) -> dict[str, Any]:
        """The report as JSON holds it.

        Keys: ``layout`` (for ``--pipeline-model-parallel-layout``, or ``--hybrid-layer-pattern``); ``stages``, in the order of the
        layout, each with the peak memory of the rank that has it; ``iteration_s``; ``iteration_over_even``,
        ``lower_bound_over_even``: over a perfectly even split of the same work under the same schedule; ``proven``: the bound
        shows that no split is noticeably faster; ``bubble_fraction``; ``limited_by``; ``sensitivity``: for several costs of the
        head, ``gain`` being the share by which the best of Megatron's flags takes longer; ``alternatives``.
        """
        plan, ranks = self.plan, self.plan.topology.pipeline_size
        return {
            "layout": self.layout,
            "stages": [
                {
                    "layers": stage.layers,
                    "forward_s": stage.forward_s,
                    "backward_s": stage.backward_s,
                    "peak_memory_bytes": _whole(plan.peak_bytes and plan.peak_bytes[place % ranks]),
                }
                for place, stage in enumerate(plan.stages)
            ],
            "iteration_s": plan.step_s,
            "iteration_over_even": self.over_even(plan.step_s),
            "lower_bound_over_even": self.over_even(plan.bound_s),
            "proven": plan.proven,
            "bubble_fraction": plan.bubble,
            "limited_by": plan.limited_by,
            "sensitivity": [
                {"head_scale": one.scale, "iteration_over_even": one.iteration_over_even, "gain": one.gain}
                for one in self.sensitivity
            ],
            "alternatives": [
                {
                    "name": one.name,
                    "layout": None if one.layout is None else self._layout_text(one),
                    "legal": one.legal,
                    "iteration_over_even": self.over_even(one.step_s),
                    "peak_memory_bytes": _whole(one.peak_bytes),
                    "reason": one.reason or None,
                }
                for one in self.alternatives
            ],
        }

    def _layout_text(self, alternative: Alternative) -> str:
        """An illegal layout need not have the layers of the pattern."""
        return self.job.layout_text(alternative.layout) if alternative.legal else str(alternative.layout)


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)
