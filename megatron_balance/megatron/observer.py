"""Observe a run: when each micro-batch ran forward and backward on each rank, loss and norm of the gradient of each step.

For our own measurements and tests; it changes nothing of the training.
"""

from __future__ import annotations

import atexit
import inspect
import json
import time
from pathlib import Path
from typing import Any

from megatron_balance.files import write_atomically
from megatron_balance.megatron.chunks import contents, first_tensor
from megatron_balance.megatron.registry import Hook, registry
from megatron_balance.reporting import global_rank

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_FLAG = "observing"


class Observer:
    """What one rank did, step by step.

    Times are measured with CUDA events, which cost no synchronisation within the step, and given in seconds of the
    monotonic clock, which all processes of a machine share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []
        self.chunks: list[dict[str, Any]] = []
        self._pending: list[tuple[str, int, int, Any, Any]] = []
        self._forwarded: dict[int, tuple[int, int]] = {}

    def hooks(self) -> tuple[Hook, ...]:
        return (
            Hook(_SCHEDULES, "forward_step", _FLAG, "times forwards", self._around_forward),
            Hook(_SCHEDULES, "backward_step", _FLAG, "times backwards", self._around_backward),
            Hook(
                "megatron.training.training",
                "train_step",
                _FLAG,
                "times steps, keeps losses and norms",
                self._around_step,
            ),
        )

    def _around_forward(self, forward_step: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            start = _event()
            result = forward_step(*args, **kwargs)
            chunk = kwargs.get("vp_stage") or 0
            done = sum(kind == "forward" and where == chunk for kind, where, *_ in self._pending)
            self._forwarded[id(first_tensor(result[0]))] = (chunk, done)
            self._pending.append(("forward", chunk, done, start, _event()))
            return result

        return forward

    def _around_backward(self, backward_step: Any) -> Any:
        def backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            chunk, microbatch = self._forwarded.pop(id(first_tensor(output_tensor)), (0, -1))
            start = _event()
            result = backward_step(input_tensor, output_tensor, *args, **kwargs)
            self._pending.append(("backward", chunk, microbatch, start, _event()))
            return result

        return backward

    def _around_step(self, train_step: Any) -> Any:
        signature = inspect.signature(train_step)

        def step(*args: Any, **kwargs: Any) -> Any:
            import torch

            if not self.steps:
                self.chunks = [_built(chunk) for chunk in signature.bind(*args, **kwargs).arguments["model"]]
            self._pending.clear()
            self._forwarded.clear()
            torch.cuda.synchronize()
            start_s, start = time.monotonic(), _event()
            result = train_step(*args, **kwargs)
            torch.cuda.synchronize()
            end_s = time.monotonic()

            def seconds(event: Any) -> float:
                return start_s + start.elapsed_time(event) / 1000

            losses, *_, gradient_norm = result[:6]
            loss = (losses or {}).get("lm loss")
            self.steps.append(
                {
                    "start_s": start_s,
                    "end_s": end_s,
                    "loss": None if loss is None else float(loss),
                    "gradient_norm": None if gradient_norm is None else float(gradient_norm),
                    "operations": [
                        [kind, chunk, microbatch, seconds(begin), seconds(end)]
                        for kind, chunk, microbatch, begin, end in self._pending
                    ],
                }
            )
            return result

        return step

    def write(self) -> None:
        """Write what was seen to `rank-<r>.json` in the folder; nothing if no step ran."""
        if not self.steps:
            return
        from megatron.training import get_args

        args = get_args()
        seen = {
            "rank": global_rank(),
            "pipeline_rank": _pipeline_rank(args),
            "layout": str(args.pipeline_model_parallel_layout),
            "chunks": self.chunks,
            "steps": self.steps,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"rank-{global_rank()}.json", json.dumps(seen))


def observe(folder: str | Path) -> None:
    """Make this process write what it saw to ``folder`` when it ends.

    To be called when Megatron can be imported, before training: ``run.main(argv, ready=lambda: observe(folder))``.
    """
    observer = Observer(Path(folder))
    for hook in observer.hooks():
        registry.apply(hook)
    atexit.register(observer.write)


def _built(chunk: Any) -> dict[str, Any]:
    """`contents` of a chunk, and its parameters on this rank."""
    return {**contents(chunk), "parameters": sum(parameter.numel() for parameter in chunk.parameters())}


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _pipeline_rank(args: Any) -> int:
    """Rank order is TP fastest, PP slowest."""
    return global_rank() // (args.world_size // args.pipeline_model_parallel_size)
