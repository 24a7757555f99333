"""Operations of a packed global batch, as `--log-throughput` has them, and as Megatron counts them from documents' bounds.

Prints JSON: of each model the count, Megatron's own with the squares of the documents alone, and that of whole sequences.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np

from megatron_balance import run

models = json.loads(sys.argv[1])
run.prepare(["--device", "cpu", "--varlen-packing"])

from megatron.training import training  # noqa: E402
from megatron.training.arguments import parse_args  # noqa: E402

from megatron_balance.megatron.packed import log  # noqa: E402
from megatron_balance.megatron.packed.planner import Window  # noqa: E402
from megatron_balance.megatron.packed.totals import TOTALS, BatchTotals, told  # noqa: E402
from megatron_balance.packing.cut import cut  # noqa: E402
from megatron_balance.packing.documents import Blend, Documents  # noqa: E402
from megatron_balance.packing.pieces import PieceRule  # noqa: E402
from megatron_balance.packing.stream import Stream  # noqa: E402

SEQUENCE, BINS = 256, 8

lengths = np.random.default_rng(1).integers(2, 400, 300)
documents = Documents.of("drawn", lengths)
stream = Stream(Blend.of([documents]), PieceRule(SEQUENCE), 0, lambda data_set, epoch: np.arange(lengths.size))
window = Window(0, cut(stream, stream.start, BINS), lambda batch: SimpleNamespace(step_s=1.0, ideal_s=1.0))
told.note({TOTALS: [BatchTotals.of(window).row]})  # as the last item of the training loop

own = training.num_floating_point_operations
count = log.COUNT.wrap(own)
counts = []
for model in models:
    sys.argv[1:] = f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length {SEQUENCE} {model}".split()
    args = parse_args()
    args.padded_vocab_size, args.kv_channels = 512, args.kv_channels or 16
    args.ffn_hidden_size = args.ffn_hidden_size or 256
    squares = float((window.batch.pieces.tokens.astype(float) ** 2).sum())
    computed = float(window.batch.pieces.tokens.sum() if args.varlen_packing else BINS * SEQUENCE)
    by_bounds = own(args, BINS, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=computed)
    counts.append([count(args, BINS), by_bounds, own(args, BINS)])
print(json.dumps(counts))
