"""Command lines read without Megatron, against Megatron's own parser, and what follows from them."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.command_line import (
    DEFAULTS,
    FLAGS,
    completed,
    per_layer,
    read_command_line,
    topology_from_arguments,
)
from megatron_balance.costs.memory import Optimizer
from megatron_balance.errors import BalanceError
from megatron_balance.model import ModelSpec, hybrid_pattern
from megatron_balance.model.arguments import spec_fields
from megatron_balance.pipeline import stock
from megatron_balance.topology import Topology

# Command lines of pretrain_gpt.py as people write them, with much that does not matter to a plan.
TRAINING = (
    "--train-iters 500000 --lr 3e-4 --min-lr 3.0e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0"
    " --adam-beta1 0.9 --adam-beta2 0.95 --data-path 0.3 /data/a_text_document 0.7 /data/b_text_document --split 949,50,1"
    " --save /ckpt --load /ckpt --save-interval 1000 --log-interval 10 --eval-iters 10 --initial-loss-scale 65536"
    " --tensorboard-dir /tb --no-load-rng --distributed-timeout-minutes 60 --log-throughput --use-mcore-models"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-percent 1.0"
    " --untie-embeddings-and-output-weights --no-masked-softmax-fusion --attention-dropout 0.0 --hidden-dropout 0.0 --bf16"
)
LINES = {
    "nothing": "",
    "gpt-345m": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    " --micro-batch-size 8 --global-batch-size 64 --fp16 --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m",
    "llama-3-8b": f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {LLAMA}"
    " --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000"
    " --micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"
    " --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B --vocab-size 128256"
    " --cross-entropy-loss-fusion --recompute-activations --sequence-parallel --attention-backend fused",
    "llama-3-405b": f"--num-layers 126 --hidden-size 16384 --num-attention-heads 128 {LLAMA} --ffn-hidden-size 53248"
    " --pipeline-model-parallel-size 16 --tensor-model-parallel-size 8 --context-parallel-size 2 --sequence-parallel"
    " --num-layers-per-virtual-pipeline-stage 1 --account-for-embedding-in-pipeline-split"
    " --account-for-loss-in-pipeline-split --microbatch-group-size-per-virtual-pipeline-stage=16",
    "mixtral": f"{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    " --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --moe-permute-fusion",
    "deepseek-v3": f"{LLAMA} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
    " --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64"
    " --v-head-dim 128 --qk-layernorm --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048"
    " --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --mtp-num-layers 1"
    " --mtp-loss-scaling-factor 0.1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --pipeline-model-parallel-layout Et*3|(tt|)*29,m|L --recompute-granularity selective"
    " --recompute-modules moe_act mlp core_attn --fp8-format e4m3 --fp8-recipe blockwise --use-precision-aware-optimizer"
    " --main-grads-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-params-dtype fp32"
    " --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    "gpt-oss": f"{LLAMA} --window-size 128,0 --window-attn-skip-freq 2 --softmax-type learnable --quick-geglu"
    " --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --kv-channels 64",
    "gemma": "--window-size (4095,0) --window-attn-skip-freq [1,1,1,1,1,0]*4+[1]*2 --kv-channels 256 --qk-layernorm",
    "no window before": "--window-size=-1,0",
    "hybrid": "--hybrid-layer-pattern M-M-|M*-M/*-/*- --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    " --mamba-state-dim 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-num-heads 64 --is-hybrid-model",
    "nemotron": "--heterogeneous-layers-config-path /models/block_configs.json --num-layers 80 --squared-relu",
    "uneven": "--decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers=13 --num-layers 40",
    "full recompute": "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    " --distribute-saved-activations",
    "rampup": "--rampup-batch-size 32 32 65536 --global-batch-size 1024 --micro-batch-size 2",
    "off": "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion"
    " --no-overlap-p2p-communication --no-position-embedding",
    "no padding": "--disable-pad-vocab-size --vocab-size 50257 --make-vocab-size-divisible-by 1",
    "fsdp": "--use-megatron-fsdp --data-parallel-sharding-strategy optim --optimizer sgd --sgd-momentum 0.0",
    "offload": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --grad-reduce-in-bf16",
    "fp4": "--fp4-format e2m1 --fp4-param-gather --transformer-impl transformer_engine",
    "given twice": "--num-layers 12 --num-layers 24 --swiglu --swiglu",
    "local": "--transformer-impl local --use-flash-attn --fp32-residual-connection --attention-softmax-in-fp32"
    " --accumulate-allreduce-grads-in-fp32 --expert-tensor-parallel-size 1 --num-distributed-optimizer-instances 2",
}


@pytest.fixture(scope="module")
def megatrons() -> argparse.ArgumentParser:
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def plain(value: Any) -> Any:
    """A value without Megatron's enumerations."""
    return getattr(value, "name", value)


def test_table_is_megatrons(megatrons):
    actions = {name: action for action in megatrons._actions for name in action.option_strings}
    readers = {int: int, str: str, float: float, None: str}
    for flag in FLAGS:
        if flag.only:
            assert not {*flag.names} & {*actions}, f"{flag.dest} is in this version too"
            continue
        action = actions[flag.names[0]]
        assert {*action.option_strings} == {*flag.names}
        assert action.dest == flag.dest
        assert plain(action.default) == flag.default, flag.dest
        assert (action.nargs == 0) == (flag.read is None), flag.dest
        if flag.read is None:
            assert action.const is (not flag.default), flag.dest
            continue
        assert action.nargs == flag.nargs, flag.dest
        assert readers.get(action.type, flag.read) is flag.read, flag.dest
        assert not flag.choices or {plain(choice) for choice in action.choices} <= {*flag.choices}, flag.dest


def test_no_argument_stands_in_the_table_twice():
    assert len(DEFAULTS) == len(FLAGS)
    assert len({name for flag in FLAGS for name in flag.names}) == sum(len(flag.names) for flag in FLAGS)


@pytest.mark.parametrize("name", LINES)
def test_arguments_are_those_that_megatron_reads(megatrons, name):
    argv = f"{LINES[name]} {TRAINING}".split()
    read = read_command_line(["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *argv])
    wanted = vars(megatrons.parse_args(argv))
    assert {**DEFAULTS, **read.arguments} == {
        dest: plain(wanted.get(dest, default)) for dest, default in DEFAULTS.items()
    }
    given = {word.split("=")[0] for word in argv if word.startswith("--")}
    assert {*read.ignored} == given - {name for flag in FLAGS for name in flag.names}


lists = st.recursive(
    st.lists(st.sampled_from("01"), max_size=3).map(lambda items: f"[{','.join(items)}]"),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("+".join),
        st.tuples(inner, st.integers(0, 4)).map(lambda pair: f"({pair[0]})*{pair[1]}"),
        st.tuples(st.integers(0, 4), inner).map(lambda pair: f"{pair[0]}*({pair[1]})"),
        st.tuples(inner, st.integers(0, 4)).map(lambda pair: f"{pair[0]}*{pair[1]}"),
    ),
    max_leaves=6,
)


@given(lists)
def test_frequencies_are_what_python_makes_of_them(text):
    assert per_layer(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    ["[0]*10**9", "[0]*999999999", "[0]*99999*99999", "[[0]]", "[0][0]", "[x]", "[0]or[1]", "__import__('os')[0]", "[0",
     "[0.5]", "[0]+1", "[0],[1]", "[True]", "(" * 5000 + "[0]" + ")" * 5000, "", "x"],
)  # fmt: skip
def test_other_expressions_are_refused(text):
    with pytest.raises(BalanceError, match="argument --moe-layer-freq: invalid per_layer value"):
        read_command_line(["--moe-layer-freq", text])


@pytest.mark.parametrize(
    "start, world_size",
    [
        ("", None),
        ("pretrain_gpt.py", None),
        ("python3 -u /opt/megatron/pretrain_gpt.py", None),
        ("WORLD_SIZE=16 CUDA_DEVICE_MAX_CONNECTIONS=1 python pretrain_gpt.py", 16),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py", 8),
        ("torchrun --nproc-per-node=8 --nnodes=4 --rdzv-endpoint=node0:29500 -m megatron_balance.run pretrain_gpt.py", 32),
        ("torchrun --nproc-per-node 8 --nnodes 1:4 pretrain_gpt.py", None),
        ("torchrun --nproc-per-node gpu pretrain_gpt.py", None),
        ("torchrun --nproc-per-node \u00b2 pretrain_gpt.py", None),
        (f"WORLD_SIZE={'9' * 5000} python pretrain_gpt.py", None),
        ("python -m torch.distributed.run --nproc-per-node 2 -m megatron_balance.run", 2),
        ("torchrun --nproc-per-node 2 -m megatron_balance.run --device cpu pretrain_gpt.py", 2),
    ],
)  # fmt: skip
def test_launchers_are_passed_over(start, world_size):
    read = read_command_line([*start.split(), *"--num-layers 12 --seed 1".split()])
    assert (read.arguments, read.ignored, read.world_size) == ({"num_layers": 12}, ("--seed",), world_size)


def test_values_of_ignored_flags_are_passed_over():
    line = "--data-path 0.5 a.py -1 2 --num-layers 12 --iterations-to-skip 3 4 --lr=1e-4 --lr 1e-5 --seed -3 --swiglu"
    read = read_command_line(line.split())
    assert read.arguments == {"num_layers": 12, "swiglu": True}
    assert read.ignored == ("--data-path", "--iterations-to-skip", "--lr", "--seed")


def test_a_value_with_spaces_belongs_to_its_flag():
    line = ["--data-path", "x", "--moe-layer-freq=([0] * 3 + [1] * 1)", "--bf16", "--wandb-exp-name=my run"]
    read = read_command_line(line)
    assert {*read.arguments} == {"moe_layer_freq", "bf16"}
    assert read.ignored == ("--data-path", "--wandb-exp-name")


def test_our_own_flags_are_arguments_too():
    line = (
        "--num-layers 12 --balanced-pipeline --balanced-pipeline-costs c.json --balanced-pipeline-head-weight 9.7,3.8"
    )
    read = read_command_line(line.split())
    assert read.arguments == {
        "num_layers": 12,
        "balanced_pipeline": True,
        "balanced_pipeline_costs": "c.json",
        "balanced_pipeline_head_weight": "9.7,3.8",
    }
    assert read.ignored == ()


@pytest.mark.parametrize(
    "line, message",
    [
        ("--num-layers", "argument --num-layers: expected one argument"),
        ("--num-layers twelve", "argument --num-layers: invalid int value: 'twelve'"),
        ("--num-layers 12 13", "unrecognized arguments: 13"),
        ("--num-layers 1000000000", "--num-layers 1000000000: at most 100000"),
        ("--mtp-num-layers 1000000000", "--mtp-num-layers 1000000000: at most 100000"),
        ("--hidden-size 99999999999999999999", "--hidden-size 99999999999999999999: no such number"),
        ("--recompute-granularity half", "invalid choice: 'half'"),
        ("--window-size 128,x", "invalid window value"),
        ("--yaml-cfg job.yaml", "--yaml-cfg takes the job from a YAML file"),
        ("--config=job.yaml", "--config is not read here"),
        ("--use-checkpoint-args --load x", "--use-checkpoint-args takes the model from a checkpoint"),
        ("--batch-size 4", "give --micro-batch-size"),
        ("--bf16 --fp16", "--bf16 and --fp16"),
        ("--balanced-pipeline-headweight 3", "unrecognized arguments: --balanced-pipeline-headweight"),
    ],
)  # fmt: skip
def test_unusable_command_lines_are_refused(line, message):
    with pytest.raises(BalanceError, match=message) as refusal:
        read_command_line(line.split())
    assert "\n" not in str(refusal.value)


class Watched(dict):
    """A mapping that knows which keys it was asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def test_no_argument_that_a_model_reads_is_ignored():
    """What the reader of models asks for and no flag gives comes from Megatron's older argument files."""
    asked = set()
    for name in ("llama-3-8b", "deepseek-v3", "hybrid", "full recompute"):
        small = "--num-layers 61 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 1000"
        watched = Watched(read_command_line(f"{small} {LINES[name]}".split()).arguments)
        spec_fields(watched)
        asked |= watched.asked
    assert asked - {*DEFAULTS} == {"linear_attention_type"}


# What the lines above leave unread: one thing asked for hides another, and a few sizes stand for Megatron's older names.
WIDTHS = "--hidden-size 512 --num-attention-heads 8 --vocab-size 1000"
MORE_LINES = (
    f"{WIDTHS} --seq-length 128 --num-layers 8 --recompute-granularity full",
    "--num-layers 8 --tokenizer-type unknown",
    "--hybrid-override-pattern M-M- --mtp-num-layers 1",
    f"{WIDTHS} --encoder-seq-length 128 --encoder-num-layers 8 --pipeline-model-parallel-size 2"
    " --num-virtual-stages-per-pipeline-rank 2",
)


def asked_by_a_plan(line: str) -> set[str]:
    """The arguments that reading, completing, sizes, model, optimizer and own split of a command line ask for."""
    watched = Watched(read_command_line(line.split()).arguments)
    for ask in (
        lambda: topology_from_arguments(watched, world_size=64),
        lambda: completed(watched),
        lambda: ModelSpec.from_arguments(watched),
        lambda: Optimizer.from_arguments(watched),
        lambda: stock.refuse_virtual_stages_of_blocks(watched, 2),
        lambda: stock.own_split(watched, 30, 0, Topology(2, 4)),
    ):
        with contextlib.suppress(
            BalanceError
        ):  # a job may be impossible; what is asked for before that is no less asked for
            ask()
    return watched.asked


def test_no_argument_of_the_table_is_left_unread():
    """A flag that decides nothing belongs to the ignored ones, which are named."""
    lines = [f"{WIDTHS} --seq-length 128 --num-layers 61 {line}" for line in LINES.values()]
    asked = set.union(*(asked_by_a_plan(line) for line in (*lines, *MORE_LINES)))
    assert sorted({*DEFAULTS} - asked) == []


def test_flags_of_kernels_and_dispatch_are_named_as_ignored():
    line = "--num-layers 8 --squared-relu --attention-backend fused --moe-token-dispatcher-type alltoall --rampup-batch-size 8 8 9"
    read = read_command_line(line.split())
    assert read.arguments == {"num_layers": 8}
    assert read.ignored == (
        "--squared-relu",
        "--attention-backend",
        "--moe-token-dispatcher-type",
        "--rampup-batch-size",
    )


def test_a_hybrid_model_by_ratios_alone_is_refused():
    with pytest.raises(BalanceError, match=r"hybrid_mlp_ratio is 0\.5 .* --hybrid-override-pattern"):
        hybrid_pattern(read_command_line(["--hybrid-mlp-ratio", "0.5"]).arguments)
    both = "--hybrid-mlp-ratio 0.5 --hybrid-override-pattern M-M-"
    assert hybrid_pattern(read_command_line(both.split()).arguments).stages == ("M-M-",)


def arguments(line: str) -> dict[str, Any]:
    return completed(read_command_line(line.split()).arguments)


def test_vocabulary():
    assert arguments("--tokenizer-type GPT2BPETokenizer")["vocab_size"] == 50257
    assert arguments("--tokenizer-type GPT2BPETokenizer --vocab-size 50000")["vocab_size"] == 50000
    assert "vocab_size" not in arguments("--padded-vocab-size 50304")
    with pytest.raises(
        BalanceError, match=r"vocabulary of Llama2Tokenizer /t\.model is not known.* add --vocab-size N"
    ):
        arguments("--tokenizer-type Llama2Tokenizer --tokenizer-model /t.model")
    with pytest.raises(BalanceError, match="vocabulary is not known"):
        arguments("--num-layers 12")


def test_model_of_a_command_line_has_what_megatron_completes():
    small = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100"
    done = arguments(f"{small} --sequence-parallel --moe-layer-recompute --num-experts 4 --bf16")
    model = ModelSpec.from_arguments(done)
    assert not model.sequence_parallel and model.recompute.modules == ("core_attn", "moe")
    assert arguments(f"{small} --sequence-parallel --tensor-model-parallel-size 2")["sequence_parallel"]
    assert arguments(f"{small} --optimizer muon --use-distributed-optimizer")["use_layer_wise_distributed_optimizer"]


VALIDATE = """
import json, sys
from megatron_balance import cpu
cpu.install(); cpu.prepare_megatron()
import megatron.training.arguments as arguments
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
args = arguments.parse_args()
arguments.validate_args(args)
names = ("sequence_parallel", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer", "data_parallel_size",
         "virtual_pipeline_model_parallel_size", "global_batch_size", "recompute_granularity")
print(json.dumps({name: getattr(args, name) for name in names}))
"""


@pytest.mark.training
@pytest.mark.parametrize(
    "line",
    [
        "--sequence-parallel --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --recompute-activations",
        "--optimizer muon --use-distributed-optimizer --pipeline-model-parallel-size 4 --global-batch-size 8",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tt|tt|ttL --use-distributed-optimizer",
    ],
)  # fmt: skip
def test_completed_arguments_are_those_that_megatron_validates(line):
    import json
    import os

    pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    line += (
        " --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
        " --micro-batch-size 1 --vocab-size 100"
    )
    command = [sys.executable, "-W", "ignore", "-c", VALIDATE, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "WORLD_SIZE": "8"})
    assert done.returncode == 0, done.stderr
    wanted = json.loads(done.stdout.splitlines()[-1])
    ours = arguments(line)
    for name in ("sequence_parallel", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer"):
        assert bool(ours.get(name)) == wanted[name], name
    topology = topology_from_arguments(ours, world_size=8)
    assert topology.data_size == wanted["data_parallel_size"]
    assert topology.virtual_size == (wanted["virtual_pipeline_model_parallel_size"] or 1)
    assert topology.num_microbatches * topology.data_size == wanted["global_batch_size"]
    assert (ModelSpec.from_arguments(ours).recompute.granularity) == wanted["recompute_granularity"]


SIZES = "--num-layers 30 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --micro-batch-size 2"


def topology(line: str, **given: int) -> Topology:
    return topology_from_arguments(read_command_line(f"{SIZES} {line}".split()).arguments, **given)


def test_topology():
    assert topology("", num_microbatches=32) == Topology(4, 32, micro_batch_size=2, tensor_size=2)
    large = topology("--global-batch-size 128 --context-parallel-size 2", world_size=64)
    assert large == Topology(4, 16, micro_batch_size=2, tensor_size=2, context_size=2, data_size=4)
    assert topology("--rampup-batch-size 8 8 100 --global-batch-size 128", world_size=8).num_microbatches == 64
    assert topology("--step-batch-size-schedule 0:8,1.5B:128,2B:64", world_size=8).num_microbatches == 64
    assert topology("", world_size=16).num_microbatches == 1
    assert topology("--overlap-moe-expert-parallel-comm", num_microbatches=8).overlap_moe


@pytest.mark.parametrize(
    "line, virtual_size",
    [
        ("--num-virtual-stages-per-pipeline-rank 3", 3),
        ("--pipeline-model-parallel-layout Et|(tt|)*14,tL", 4),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 2", 4),
        ("--num-layers-per-virtual-pipeline-stage 2", 4),  # of 30 layers, on 4 ranks
        ("--num-layers-per-virtual-pipeline-stage 4 --account-for-embedding-in-pipeline-split"
         " --account-for-loss-in-pipeline-split", 2),
        ("--hybrid-layer-pattern M-M*|M-M-|M-M*|M-M-|M|M|M|M", 2),
        ("--hybrid-layer-pattern M-M*M-M-M-M*M-M-", 1),
    ],
)  # fmt: skip
def test_virtual_size(line, virtual_size):
    assert topology(line, num_microbatches=8).virtual_size == virtual_size


def test_groups_of_micro_batches_are_of_the_interleaved_schedule():
    group = "--microbatch-group-size-per-virtual-pipeline-stage 8"
    assert topology(group, num_microbatches=32).microbatch_group_size is None
    virtual = topology(f"{group} --num-virtual-stages-per-pipeline-rank 2", num_microbatches=32)
    assert virtual.microbatch_group_size == 8


@pytest.mark.parametrize(
    "line, given, message",
    [
        ("", {}, "number of micro-batches is not known: add --num-microbatches M, or --world-size N"),
        ("", {"num_microbatches": 0}, "num_microbatches must be at least 1, not 0"),
        ("", {"world_size": 12}, "--world-size 12 is not a multiple of 8"),
        ("", {"world_size": 0}, "--world-size 0"),
        ("--global-batch-size 30", {"world_size": 32}, r"--global-batch-size 30 is not a multiple of .* \(2 \* 4\)"),
        ("--step-batch-size-schedule 0:8", {"world_size": 48}, r"schedule with 8 is not a multiple of .* \(2 \* 6\)"),
        ("--step-batch-size-schedule 0:8,1B", {"world_size": 8}, "no list of THRESHOLD:BATCH_SIZE entries"),
        ("--step-batch-size-schedule 0:0", {"world_size": 8}, "no list of THRESHOLD:BATCH_SIZE entries"),
        ("--pipeline-model-parallel-size 0", {"world_size": 8}, "--pipeline-model-parallel-size 0: must be 1 or more"),
        ("--tensor-parallel-num-weight-shards 4", {"world_size": 8}, "--tensor-parallel-num-weight-shards 4"),
        ("--use-megatron-fsdp", {"world_size": 8}, "--use-megatron-fsdp with --pipeline-model-parallel-size 4: .* stops"),
        ("--expert-model-parallel-size 4", {"world_size": 16}, r"16 processes are no multiple of 32, .* 2 \* 4 \* 4\)"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
         {"num_microbatches": 8}, "leave --no-overlap-p2p-communication out"),
        ("--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2", {"world_size": 8},
         "each give the number of virtual stages"),
        ("--pipeline-model-parallel-layout Et|tL", {"world_size": 8}, "has 2 stages, not a multiple of"),
        ("--pipeline-model-parallel-layout Et|x|t|tL", {"world_size": 8}, "holds 'x'"),
        ("--hybrid-layer-pattern M|M|M --num-layers 3", {"world_size": 8}, "--hybrid-layer-pattern has 3 stages"),
    ],
)  # fmt: skip
def test_impossible_topologies_are_refused(line, given, message):
    with pytest.raises(BalanceError, match=message):
        topology(line, **given)


def test_reading_needs_no_heavy_imports():
    program = (
        "import sys, megatron_balance.command_line, megatron_balance.hugging_face;"
        "print([name for name in ('torch', 'numpy', 'numba', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
