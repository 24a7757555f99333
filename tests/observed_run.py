"""What `launch` starts on each rank: FOLDER for the observations, then the arguments of `megatron_balance.run`.

The ranks are patient with one another: on a machine whose cores tests share, one may be many seconds behind.
"""

import sys

from megatron_balance import reporting, run
from megatron_balance.megatron.observer import observe

_PATIENCE_S = 100.0

folder, *arguments = sys.argv[1:]


def ready() -> None:
    observe(folder)
    if "--straggler-trace" in arguments:
        from megatron_balance.megatron.recorder import live

        live._PATIENCE_S = _PATIENCE_S


reporting._HOLD_BACK_S = _PATIENCE_S
run.main(arguments, ready=ready)
