"""What `launch` starts on each rank: FOLDER for the observations, then the arguments of `megatron_balance.run`."""

import sys

from megatron_balance import run
from megatron_balance.megatron.observer import observe

folder, *arguments = sys.argv[1:]
run.main(arguments, ready=lambda: observe(folder))
