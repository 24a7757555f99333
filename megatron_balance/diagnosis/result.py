"""What diagnosis says of a job: the values that pass from the analysis to the reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

YES, NO, UNKNOWN = "yes", "no", "not measurable"
STAGE_SPLIT, SEQUENCE_LENGTHS, WORKER, GARBAGE, COMMUNICATION = (
    "stage split",
    "sequence lengths",
    "one worker",
    "garbage collection",
    "communication",
)
CAUSES = (STAGE_SPLIT, SEQUENCE_LENGTHS, WORKER, GARBAGE, COMMUNICATION)
HEALTHY = "healthy"
UNNAMED = "no cause by name"


@dataclass(frozen=True, eq=False)
class Slowdown:
    """What the replay says. A slowdown is time over the time of a job in which nothing straggles.

    Attributes:
        steps: numbers of the steps, int64 of shape [steps].
        recorded_s: seconds of each step as recorded, shape [steps].
        actual_s: seconds of each step as replayed from its own durations, shape [steps].
        ideal_s: seconds of each step with every duration at its ideal, shape [steps].
        slowdown: S, of the whole trace.
        by_operation: S_t: slowdown when all but this kind of operation are ideal.
        by_worker: S_w of each worker, shape [PP, DP]; the smaller of its two ranks'.
        by_stage, by_dp_rank: slowdown of a whole pipeline rank, shape [PP], and of a whole data-parallel rank, shape [DP].
        by_worker_per_step: shape [steps, PP, DP].
        last_stage: M_S, share of the slowdown that goes with the last stage alone.
        slowest_workers: M_W, share that goes with the slowest 3 % of the workers.
    """

    steps: np.ndarray
    recorded_s: np.ndarray
    actual_s: np.ndarray
    ideal_s: np.ndarray
    slowdown: float
    by_operation: dict[str, float]
    by_worker: np.ndarray
    by_stage: np.ndarray
    by_dp_rank: np.ndarray
    by_worker_per_step: np.ndarray
    last_stage: float
    slowest_workers: float


@dataclass(frozen=True)
class Check:
    """One line of the checklist.

    Attributes:
        cause: which of ``CAUSES`` it speaks for.
        symptom: what is looked for, a short sentence.
        measured: the figure, with its unit and what it was taken from.
        threshold: above or below which figure the answer is yes.
        answer: ``yes`` (the symptom is there), ``no`` or ``not measurable``.
        value, limit: the two as numbers; None where not measurable.
    """

    cause: str
    symptom: str
    measured: str
    threshold: str
    answer: str
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Fix:
    """What to do about a cause.

    Attributes:
        cause: which of ``CAUSES``.
        flags: for the command line, as they would be typed.
        predicted_step_s, present_step_s: seconds of the step with it and without.
        memory: whose memory it keeps to: ``within the present split's memory``, ``free``, or empty where it does not matter.
        note: what else the user should know.
    """

    cause: str
    flags: tuple[str, ...]
    predicted_step_s: float
    present_step_s: float
    memory: str = ""
    note: str = ""

    @property
    def gain(self) -> float:
        """Present step over predicted step, minus 1."""
        return self.present_step_s / self.predicted_step_s - 1.0


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """All that is said of a job.

    Attributes:
        slowdown: what the replay says.
        causes: share of the slowdown, S - 1, for which each of ``CAUSES`` stands; the rest has no name.
        verdict: causes that count, worst first; ``(HEALTHY,)`` where none does, ``(UNNAMED,)`` where the job straggles all the
            same.
        worker: the slow worker, (DP rank, PP rank), where there is one, whether or not it counts.
        checklist: symptoms.
        fixes: best first.
        waste_gpu_hours: of the recorded steps.
        waste_per_day_gpu_hours: at this rate.
        by_cause: step as it was over the step without each of ``CAUSES``, all else as it was: what its removal alone would bring.
    """

    slowdown: Slowdown
    causes: dict[str, float]
    verdict: tuple[str, ...]
    worker: tuple[int, int] | None
    checklist: tuple[Check, ...]
    fixes: tuple[Fix, ...]
    waste_gpu_hours: float
    waste_per_day_gpu_hours: float
    by_cause: dict[str, float] = field(default_factory=dict)
