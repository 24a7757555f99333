"""What the matrix runs for each checkout, and what its losses are compared with."""

from __future__ import annotations

from dataclasses import dataclass

STEPS, RESUMED_AT = 10, 5

# A GPT of a few thousand parameters; fp32 and no dropout, so that losses can be compared to the last digits. Evaluation comes
# between steps, as its micro-batches have other lengths.
MODEL = (
    "--num-layers 6 --untie-embeddings-and-output-weights --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant"
    f" --train-iters {STEPS} --split 80,20,0 --tokenizer-type NullTokenizer --vocab-size 127"
    " --make-vocab-size-divisible-by 8 --num-workers 0 --log-interval 1 --eval-iters 1 --eval-interval 4"
    " --transformer-impl local --hidden-dropout 0 --attention-dropout 0 --ckpt-format torch_dist"
)
_START = "--load start --finetune --no-load-optim --no-load-rng"
_SAVING = f"--save saved --save-interval {RESUMED_AT}"
_TWO_STAGES = "--pipeline-model-parallel-size 2"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
# Costs are given, so that every version gets the same uneven split.
_BALANCED = (
    "--balanced-pipeline --balanced-pipeline-costs analytic --balanced-pipeline-head-weight 3,2"
    " --balanced-pipeline-embedding-weight 0.1,0.4"
)
_PACKED = "--varlen-packing --calculate-per-token-loss --varlen-packing-shapes"


@dataclass(frozen=True)
class Trial:
    """One training run.

    Attributes:
        name: of its folder.
        flags: beyond `MODEL`.
        processes: ranks.
        heading: of its column; empty for what only others are compared with.
        like: name of the trial whose losses it must have; a trial of fewer steps has its last ones.
    """

    name: str
    flags: str
    processes: int = 2
    heading: str = ""
    like: str = ""

    @property
    def balances(self) -> bool:
        """Whether its stages are to hold different numbers of layers."""
        return _BALANCED in self.flags

    @property
    def packs(self) -> bool:
        """Whether it is to train on whole documents, and so has other losses than on chopped ones."""
        return _PACKED in self.flags


TRIALS = (
    # Initial weights depend on the number of stages: all begin from those of one process.
    Trial("start", "--train-iters 1 --save start --save-interval 1 --no-save-optim --no-save-rng --eval-iters 0", 1),
    Trial("chopped", _START, 1),
    Trial("stock", f"{_START} {_TWO_STAGES}", heading="stock", like="chopped"),
    Trial("balanced", f"{_START} {_TWO_STAGES} {_BALANCED}", heading="balanced", like="chopped"),
    Trial(
        "balanced-virtual",
        f"{_START} {_TWO_STAGES} {_VIRTUAL} {_BALANCED}",
        heading="balanced, 2 virtual stages",
        like="chopped",
    ),
    Trial("packed-alone", f"{_START} {_PACKED} fixed", 1),
    Trial("packed-fixed", f"{_START} {_TWO_STAGES} {_PACKED} fixed", heading="packed, fixed", like="packed-alone"),
    Trial(
        "packed-variable",
        f"{_START} {_TWO_STAGES} {_PACKED} variable",
        heading="packed, variable",
        like="packed-alone",
    ),
    Trial(
        "both",
        f"{_START} {_TWO_STAGES} {_BALANCED} {_PACKED} auto {_SAVING}",
        heading="both",
        like="packed-alone",
    ),
    Trial(
        "both-virtual",
        f"{_START} {_TWO_STAGES} {_VIRTUAL} {_BALANCED} {_PACKED} auto",
        heading="both, 2 virtual stages",
        like="packed-alone",
    ),
    Trial(
        "resumed",
        f"--load saved --ckpt-step {RESUMED_AT} {_TWO_STAGES} {_BALANCED} {_PACKED} auto",
        heading="both, resumed",
        like="both",
    ),
)
