"""A training job's command line as it is, read without Megatron: the flags that matter to a plan, by Megatron's names.

One table holds those flags; what is not in it is passed over and named.
"""

from megatron_balance.command_line.derived import completed, topology_from_arguments
from megatron_balance.command_line.flags import DEFAULTS, FLAGS, per_layer
from megatron_balance.command_line.reading import CommandLine, read_command_line

__all__ = [
    "DEFAULTS",
    "FLAGS",
    "CommandLine",
    "completed",
    "per_layer",
    "read_command_line",
    "topology_from_arguments",
]
