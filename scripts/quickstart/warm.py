"""`python -m quickstart.warm`: compiles what planning and packing run, once for a checkout, while a processor has nothing to do.

Otherwise the jobs would, the first time, while the other one waits: Numba takes half a minute.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from megatron_balance import cli
from megatron_balance.processes import die_with_parent

_MODEL = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 65536"
    " --micro-batch-size 1 --num-microbatches 8 --untie-embeddings-and-output-weights"
).split()
_LENGTHS = [10 + number * 37 % 400 for number in range(400)]


def main() -> None:
    die_with_parent()
    cli.main(["plan", *_MODEL, "--pipeline-model-parallel-size", "2"])
    with tempfile.TemporaryDirectory() as folder:
        lengths = Path(folder) / "lengths.json"
        lengths.write_text(json.dumps(_LENGTHS))
        job = ["--seq-length", "2048", "--data-parallel-size", "2", "--global-batch-size", "2", "--cost-ratio", "1000"]
        cli.main(["pack", "--lengths", str(lengths), *job])


if __name__ == "__main__":
    main()
