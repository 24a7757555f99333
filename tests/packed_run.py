"""As `observed_run.py`, and writes what each rank's last stage was fed: FOLDER, then the arguments of `megatron_balance.run`.

``fed-<rank>.jsonl`` gets a line for each micro-batch of a training step: the samples consumed before it, and of each sequence
with labels that count the inputs and these labels. A line is complete before the step ends. ``sent-<rank>.json`` says at the end
how often the shape of a tensor was sent, how many tensors were, and of what lengths micro-batches were.

With ``HELD_AT=SAMPLES`` in the environment the step with so many samples consumed before it does not end, so that what kills the
job meets it there, however late it comes.
"""

import atexit
import json
import os
import signal
import sys
from itertools import compress
from pathlib import Path

from megatron_balance import run
from megatron_balance.megatron.observer import observe


def ready(folder: str) -> None:
    import torch

    from megatron_balance.megatron.packed import step
    from megatron_balance.megatron.packed.context import whole
    from megatron_balance.reporting import global_rank

    observe(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    sent, rows = count_messages(Path(folder)), set()
    next_batch, file = step.next_batch, (Path(folder) / f"fed-{global_rank()}.jsonl").open("w")
    held_at = os.environ.get("HELD_AT")

    def seen(*args, **kwargs):
        from megatron.core import mpu
        from megatron.training import get_args

        batch = next_batch(*args, **kwargs)
        rows.add(batch.positions.numel())
        sent["lengths"] = sorted(rows)
        last = mpu.is_pipeline_last_stage(ignore_virtual=True) and batch.labels is not None
        if last and torch.is_grad_enabled() and mpu.get_tensor_model_parallel_rank() == 0:
            lengths = batch.packed.lengths
            lines = zip(
                *(
                    [part.tolist() for part in whole(row[0], lengths).split(lengths)]
                    for row in (batch.tokens, batch.labels, batch.loss_mask)
                ),
                strict=True,
            )
            pieces = [
                [list(compress(tokens, mask)), list(compress(labels, mask))]
                for tokens, labels, mask in lines
                if any(mask)
            ]
            if mpu.get_context_parallel_rank() == 0:
                file.write(json.dumps([get_args().consumed_train_samples, pieces]) + "\n")
                file.flush()
                while str(get_args().consumed_train_samples) == held_at:
                    signal.pause()
        return batch

    step.next_batch = seen


def count_messages(folder: Path) -> dict[str, object]:
    """Count what stock Megatron sends, shapes and tensors apart; written when the process ends."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_balance.reporting import global_rank

    counts = {"shapes": 0, "tensors": 0}

    def counted(kind, function):
        def count(*args, **kwargs):
            counts[kind] += 1
            return function(*args, **kwargs)

        return count

    P2PCommunicator._communicate_shapes = counted("shapes", P2PCommunicator._communicate_shapes)
    P2PCommunicator._communicate = counted("tensors", P2PCommunicator._communicate)
    atexit.register(lambda: (folder / f"sent-{global_rank()}.json").write_text(json.dumps(counts)))
    return counts


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    run.main(arguments, ready=lambda: ready(folder))
