"""As `observed_run.py`, and writes what each rank logs of packing: FOLDER, then the arguments of `megatron_balance.run`.

``logged-<rank>.json`` says at the end: the operations counted after each step; at each line of Megatron's, how many steps there
had been and the operations that its throughput is of; how many global batches were cut in this process; and, cut and placed now, of
each step's global batch its tokens, fill and simulated step over ideal, and where the next one begins.
"""

import atexit
import json
import sys
from pathlib import Path

from megatron_balance import run
from megatron_balance.megatron.observer import observe


def ready(folder: str) -> None:
    from megatron_balance.megatron.packed import data, log, planner
    from megatron_balance.megatron.registry import Hook, registry
    from megatron_balance.reporting import global_rank

    observe(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    seen = {"counted": [], "lines": [], "cuts": 0}
    cut, begin_interval = planner.cut, data.begin_interval

    def counted(count):
        def record(*args, **kwargs):
            operations = count(*args, **kwargs)
            if log._interval.is_logged:
                seen["lines"].append([len(seen["counted"]), operations])
            else:
                seen["counted"].append(operations)
            return operations

        return record

    def cuts(*args):
        seen["cuts"] += 1
        return cut(*args)

    def hooked():  # ours are in place
        begin_interval()
        registry.apply(Hook("megatron.training.training", "num_floating_point_operations", "test", "records", counted))

    def write():
        from megatron.core.datasets.utils import Split

        planner.cut = cut
        planned, item, batches = data.planner_of(Split.train), 0, []
        for _ in seen["counted"]:
            window = planned.window(item)
            placement, tokens = window.placement, int(window.batch.pieces.tokens.sum())
            batches.append(
                [tokens, window.batch.fill, placement.step_s / placement.ideal_s, window.batch.stop.to_json()]
            )
            item = window.stop
        Path(folder, f"logged-{global_rank()}.json").write_text(json.dumps({**seen, "batches": batches}))

    planner.cut, data.begin_interval = cuts, hooked
    atexit.register(write)


folder, *arguments = sys.argv[1:]
run.main(arguments, ready=lambda: ready(folder))
