"""The measuring process: `python -m megatron_balance.megatron.measuring PARENT FILE <arguments of megatron_balance.run>`."""

import sys

from megatron_balance.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # before the imports, which take seconds
    from megatron_balance.megatron.measuring.measurement import main

    main(*sys.argv[2:])
