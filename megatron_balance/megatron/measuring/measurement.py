"""What the measuring process does.

It runs the job's script as it is, with Megatron's own training loop, on a model of few layers and a process group that
moves nothing, until it has seen enough steps; then it writes the costs and ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_balance import run
from megatron_balance.costs.table import save_costs
from megatron_balance.megatron.agreement import stay_alone
from megatron_balance.megatron.chunks import inner
from megatron_balance.megatron.measuring.clock import Clock
from megatron_balance.megatron.measuring.job import Batches, Shrunk, serves, shrink, use_fake_groups
from megatron_balance.megatron.measuring.samples import Samples
from megatron_balance.megatron.registry import Hook, registry

_WARMUP = 2  # steps that do not count: the first ones allocate and compile
_LEAST_STEPS, _MOST_STEPS = 5, 50
_ENOUGH_S = 4.0
_FULL_LENGTH_PASSES = 3  # of a step; one more for each shorter length
_TRAINING = "megatron.training.training"
_PURPOSE = "measuring costs"


class Measurement:
    """Steps of the small job, timed until there are enough, then written to ``file``."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._clock = Clock()
        self._began_s = 0.0
        self._steps = 0
        self._shrunk: Shrunk
        self._samples: Samples

    def hooks(self) -> tuple[Hook, ...]:
        """What has to be hooked; outermost last."""
        return (
            Hook("megatron.training.arguments", "validate_args", _PURPOSE, "makes the job small", self._shrinks),
            Hook(_TRAINING, "build_train_valid_test_data_iterators", _PURPOSE, "random tokens", serves(self._batches)),
            Hook(_TRAINING, "train_step", _PURPOSE, "times steps", self._around_step),
            *self._clock.hooks(),
        )

    def _shrinks(self, validate_args: Callable[..., Any]) -> Callable[..., Any]:
        def validate(args: Any, *rest: Any, **kwargs: Any) -> Any:
            self._shrunk = shrink(args, _FULL_LENGTH_PASSES)
            use_fake_groups(args.world_size)
            return validate_args(args, *rest, **kwargs)

        return validate

    def _batches(self) -> Batches:
        from megatron.training import get_args

        return Batches(get_args(), self._shrunk.lengths)

    def _around_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if self._steps == 0:
                self._start(model)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = train_step(forward_step, data, model, *args, **kwargs)
            end.record()
            torch.cuda.synchronize()
            passes = self._clock.read()
            if self._steps >= _WARMUP:
                self._samples.add(passes, start.elapsed_time(end) / 1000)
            self._steps += 1
            self._stop_when_enough()
            return result

        return step

    def _start(self, model: list[Any]) -> None:
        module = inner(model[0])
        self._clock.watch(module)
        self._samples = Samples(self._shrunk, module)

    def _stop_when_enough(self) -> None:
        if self._steps == _WARMUP:
            self._began_s = time.monotonic()
        counted, elapsed_s = self._steps - _WARMUP, time.monotonic() - self._began_s
        if counted >= _LEAST_STEPS and (elapsed_s >= _ENOUGH_S or counted >= _MOST_STEPS):
            save_costs(self.file, self._samples.table())
            sys.stdout.flush()
            os._exit(0)  # at once: the costs are there, and tearing down libraries may fail or wait


def main(file: str, *arguments: str) -> None:
    """Measure, write the costs to ``file`` and exit; ``arguments`` are those of `megatron_balance.run`."""
    measurement = Measurement(Path(file))
    stay_alone()

    def ready() -> None:
        for hook in measurement.hooks():
            registry.apply(hook)

    run.main([*arguments], ready)
    raise SystemExit("the script ended without training a step")
