"""The target of `torchrun` for both sides: `observed.py FOLDER HOW... -- <arguments of megatron_balance.run>`.

HOW is ``--turns JOB TURN,TURN...``: trains a step when the turn is its JOB's; or ``--both``: trains every batch twice, with our
forward step and with the training script's own. Each rank writes what it saw to FOLDER/batches-<r>.json, and in turns also what
`megatron_balance.megatron.observer` does. A job without ``--varlen-packing`` gets our torch attention all the same.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_balance.processes import die_with_parent
from quickstart.observed import pin
from quickstart.turns import take_turns

_TRAINING = "megatron.training.training"
_PURPOSE = "comparing packed training"
OURS, THEIRS = "ours", "theirs"


def main(argv: list[str]) -> None:
    split = argv.index("--")
    (folder, how, *turns), arguments = argv[:split], argv[split + 1 :]
    die_with_parent()
    if arguments[:2] == ["--device", "cpu"]:
        pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    # Late: OpenMP looks at the cores when torch is loaded.
    from megatron_balance import run

    run.main(arguments, ready=lambda: _observe(Path(folder), how, turns))


def _observe(folder: Path, how: str, turns: list[str]) -> None:
    from megatron_balance.megatron.observer import observe
    from megatron_balance.megatron.packed.attention import attention_hook
    from megatron_balance.megatron.registry import Hook, registry

    folder.mkdir(parents=True, exist_ok=True)
    registry.apply(attention_hook("torch"))  # the same hook as a packed job's, which then is not applied twice
    if how == "--both":
        both = Both()
        registry.apply(Hook(_TRAINING, "pretrain", _PURPOSE, "keeps the script's forward step", both.around_pretrain))
        registry.apply(Hook(_TRAINING, "train_step", _PURPOSE, "trains twice", both.around_step))
        atexit.register(_write, folder, lambda: both.steps)
        return
    observe(folder)
    batches = Batches()
    registry.apply(Hook(_TRAINING, "train_step", _PURPOSE, "notes the batches", batches.around_step))
    registry.apply(
        Hook("megatron.core.rerun_state_machine", "RerunDataIterator.__next__", _PURPOSE, "times", batches.around_next)
    )
    atexit.register(_write, folder, lambda: batches.steps)
    take_turns(folder.parent, *turns)


def _write(folder: Path, steps: Callable[[], list[dict[str, Any]]]) -> None:
    from megatron_balance.files import write_atomically

    if found := steps():
        write_atomically(folder / f"batches-{os.environ['RANK']}.json", json.dumps(found))


class Batches:
    """What a rank was fed: for each step the seconds in the loader, and of each micro-batch its sequences that hold labels."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def around_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps.append({"loader_s": 0.0, "sequences": [], "labels": 0})
            return train_step(*args, **kwargs)

        return step

    def around_next(self, following: Callable[..., Any]) -> Callable[..., Any]:
        def timed(self_: Any) -> Any:
            start_s = time.perf_counter()
            item = following(self_)
            seconds = time.perf_counter() - start_s
            if self.steps:
                step = self.steps[-1]
                step["loader_s"] += seconds
                step["sequences"].append(sequences_with_labels(item))
                step["labels"] += int(item["loss_mask"].sum())
            return item

        return timed


class Both:
    """Trains every batch twice, the side that begins in turn, and notes the seconds of both, of the loader, and of one that has
    nothing to do: what torch takes to hand over as many tensors.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._theirs: Callable[..., Any]
        self._idle: Iterator[Any] | None = None

    def around_pretrain(self, pretrain: Callable[..., Any]) -> Callable[..., Any]:
        """Applied behind the hook that puts our forward step in, and so called before it."""
        signature = inspect.signature(pretrain)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._theirs = signature.bind(*args, **kwargs).arguments["forward_step_func"]
            return pretrain(*args, **kwargs)

        return run

    def around_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(ours: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            seen, items = self._fetched(data)
            feeds = {OURS: (ours, items), THEIRS: (self._theirs, [as_stock(item) for item in items])}
            results = {}
            for side in (OURS, THEIRS) if len(self.steps) % 2 == 0 else (THEIRS, OURS):
                forward_step, feed = feeds[side]
                seen[side], results[side] = self._timed(train_step, side, forward_step, iter(feed), *args, **kwargs)
            losses = {side: float(result[0]["lm loss"]) for side, result in results.items()}
            seen["loss_difference"] = abs(losses[OURS] - losses[THEIRS]) / abs(losses[THEIRS])
            self.steps.append(seen)
            return results[OURS]

        return step

    def _fetched(self, data: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Seconds in both loaders for the micro-batches of a step, the one that is asked first in turn, and the micro-batches."""
        loaders = {"loader_s": data, **({"idle_s": self._idle} if self._idle else {})}
        names = list(loaders) if len(self.steps) // 2 % 2 == 0 else list(reversed(loaders))
        fetched = {name: _fetch(loaders[name]) for name in names}
        items = fetched["loader_s"][1]
        if self._idle is None:
            self._idle = idle_loader(items[0])
        return {name: seconds for name, (seconds, _) in fetched.items()}, items

    def _timed(
        self,
        train_step: Callable[..., Any],
        side: str,
        forward_step: Any,
        feed: Iterator[Any],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[float, Any]:
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training import get_args

        get_args().dataloader_inter_document_masking = side == THEIRS  # the script's `get_batch` asks
        start_s = time.perf_counter()
        result = train_step(forward_step, RerunDataIterator(feed), *args, **kwargs)
        return time.perf_counter() - start_s, result


class _Same:
    """A data set whose items are all the same."""

    def __init__(self, item: dict[str, Any], length: int) -> None:
        self._item, self._length = item, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._item


def idle_loader(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A loader as Megatron makes it, that gives this micro-batch again and again, without any work."""
    import torch
    from megatron.training import get_args

    args = get_args()
    return iter(
        torch.utils.data.DataLoader(
            _Same({name: value[0].clone() for name, value in batch.items()}, args.train_iters * args.global_batch_size),
            batch_size=args.micro_batch_size,
            num_workers=args.num_workers,
            pin_memory=True,
            persistent_workers=args.num_workers > 0,
        )
    )


def _fetch(data: Any) -> tuple[float, list[dict[str, Any]]]:
    """Seconds in the loader for the micro-batches of a step, and those."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    start_s = time.perf_counter()
    items = [next(data) for _ in range(get_num_microbatches())]
    return time.perf_counter() - start_s, items


def as_stock(item: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch of ours with what Megatron's own data set gives with ``--dataloader-inter-document-masking``."""
    import torch

    positions = item["position_ids"]
    length = positions.shape[1]
    starts = (positions[0] == 0).nonzero()[:, 0]
    bounds = torch.full((1, length + 1), length, dtype=torch.int32)
    bounds[0, : starts.numel()] = starts
    return {**item, "cu_seqlens": bounds, "max_seqlen": bounds.diff().max().reshape(1)}


def sequences_with_labels(item: dict[str, Any]) -> list[int]:
    """Tokens of the sequences of a micro-batch, without those of padding."""
    positions, valid = item["position_ids"].flatten(), item["loss_mask"].flatten()
    starts = (positions == 0).nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([positions.numel()]))
    return lengths[valid[starts] > 0].tolist()


if __name__ == "__main__":
    main(sys.argv[1:])
