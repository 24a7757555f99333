"""As `packed_run.py`, and each step is run twice, as Megatron's rerun machine does to look for hardware that errs.

``--rerun-mode report_stats``, which asks for that, is refused by Megatron 0.19 itself: it does not know the word.
"""

import functools
import sys

import packed_run

from megatron_balance import run


def ready(folder: str) -> None:
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    initialize = RerunStateMachine.__init__

    @functools.wraps(initialize)
    def runs_twice(self, *args, **kwargs):
        initialize(self, *args, **{**kwargs, "mode": RerunMode.REPORT_DETERMINISM_STATS})

    RerunStateMachine.__init__ = runs_twice
    packed_run.ready(folder)


folder, *arguments = sys.argv[1:]
run.main(arguments, ready=lambda: ready(folder))
