"""Balanced splits of experts, multi-latent attention, multi-token prediction and hybrid models: legal, and no loss changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import TINY, dry_run
from test_balanced_training import TOLERANCE, built, largest_difference

pytestmark = pytest.mark.training

ANALYTIC = "--balanced-pipeline --balanced-pipeline-costs analytic"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"

DEEPSEEK_V3 = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096"
    " --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 2048 --train-iters 1 --lr 1e-4 --bf16"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 129279 --make-vocab-size-divisible-by 1 --eval-interval 1"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512"
    " --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8"
    " --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size 64 --use-distributed-optimizer --mtp-num-layers 1"
    f" --pipeline-model-parallel-size 16 {VIRTUAL} --balanced-pipeline --balanced-pipeline-device H100"
)
# The same shape, a few thousand parameters wide. No loss of load balance: it is a mean over micro-batches of one stage.
SMALL_DEEPSEEK = (
    "--num-layers 8 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm --q-lora-rank 16 --kv-lora-rank 8"
    " --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --num-experts 4 --moe-router-topk 2"
    " --moe-layer-freq [0,0,0,1,1,1,1,1] --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 16"
    " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --mtp-num-layers 1"
)
HYBRID = (
    "--hybrid-layer-pattern *-*-*-*- --spec local_stack stack --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --normalization RMSNorm"
)


def _block(attention: str = "", mlp: str = "") -> dict[str, dict]:
    """One layer's configuration; a part is ``linear``, left out (``no_op``) or of the usual width."""
    parts = {"attention": (attention, {"n_heads_in_group": 2}), "ffn": (mlp, {"ffn_mult": 1.0})}
    return {
        name: {key: None if what else width for key, width in usual.items()}
        | {"no_op": what == "no_op", "replace_with_linear": what == "linear"}
        for name, (what, usual) in parts.items()
    }


_BLOCKS = {
    "hidden_act": "silu",
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 8.0},
    "block_configs": [
        *[_block()] * 3,
        _block("no_op"),
        _block("linear"),
        _block("", "no_op"),
        _block("", "linear"),
        _block(),
    ],
}
HETEROGENEOUS = (
    f"--num-layers 8 --heterogeneous-layers-config-encoded-json {json.dumps(_BLOCKS, separators=(',', ':'))} --swiglu"
    " --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope"
    " --use-rotary-position-embeddings --use-rope-scaling --rope-scaling-factor 8.0 --rotary-base 10000"
    " --untie-embeddings-and-output-weights --disable-bias-linear"
)


@pytest.fixture(scope="module", params=["any", "last"])
def deepseek_v3_plan(request, tmp_path_factory) -> tuple[str, dict]:
    """Placement of multi-token prediction, and the plan of DeepSeek-V3 with it."""
    folder = tmp_path_factory.mktemp("deepseek-v3")
    file = folder / "plan.json"
    flags = f"{DEEPSEEK_V3} --balanced-pipeline-mtp-placement {request.param} --balanced-pipeline-plan {file}"
    run = dry_run(folder, flags.split(), 1024)
    assert run.status == 0, run.output
    return request.param, json.loads(file.read_text())


VALIDATE = """
import json, sys
import megatron.core
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
layout = PipelineParallelLayerLayout.from_str(sys.argv[1], 16)
apart = layout.validate_layer_layout(num_layers=61, mtp_num_layers=1)
print(json.dumps([megatron.core.__file__, layout.virtual_pipeline_model_parallel_size, apart]))
"""


def validated(text: str, *folders: Path) -> list:
    """Where the Megatron that is found first in ``folders`` lies, virtual stages, whether prediction is apart from the head."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", VALIDATE, text],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_megatron_accepts_the_plan_of_deepseek_v3(deepseek_v3_plan):
    placement, plan = deepseek_v3_plan
    assert plan["p2p_s"] > 0  # by an H100's link
    _, virtual, apart = validated(plan["layout"])
    assert virtual == 2
    assert not (apart and placement == "last"), plan["layout"]


def test_checkout_accepts_the_plan_of_deepseek_v3(deepseek_v3_plan, megatron_lm):
    placement, plan = deepseek_v3_plan
    file, virtual, apart = validated(plan["layout"], megatron_lm)
    assert Path(file).is_relative_to(megatron_lm) and virtual == 2
    assert not (apart and placement == "last"), plan["layout"]


@pytest.mark.parametrize(
    ("parallel", "weight", "layout"),
    [
        ("2", "3", r"Et+\|t+mL"),
        ("4", "1", r"Et+\|t+\|t+\|t*mL"),
        ("4", "7", r"Et+\|t+\|t*m\|L"),
        (f"2 {VIRTUAL}", "12", r"Et+\|\|t*\|mL"),
    ],
    ids=["PP2", "PP4", "PP4-apart", "PP2-empty"],
)
def test_a_small_deepseek_trains_with_the_losses_of_one_stage(from_checkpoint, parallel, weight, layout):
    split = f"--pipeline-model-parallel-size {parallel} {ANALYTIC} --balanced-pipeline-head-weight {weight}"
    run = from_checkpoint(SMALL_DEEPSEEK, split, int(parallel.split()[0]))
    assert re.fullmatch(layout, run.ranks[0]["layout"]), run.ranks[0]["layout"]
    assert largest_difference(run.losses, from_checkpoint(SMALL_DEEPSEEK).losses) <= TOLERANCE
    assert [number for stage in built(run) for number in stage] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def local_stack(monkeypatch):
    """`--spec local_stack stack` can be imported."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


@pytest.mark.parametrize("virtual", ["", VIRTUAL], ids=["PP2", "PP2-VPP2"])
def test_a_hybrid_model_trains_with_the_losses_of_one_stage(local_stack, from_checkpoint, virtual):
    split = f"--pipeline-model-parallel-size 2 {virtual} {ANALYTIC} --balanced-pipeline-head-weight 3"
    run = from_checkpoint(HYBRID, split, 2)
    assert largest_difference(run.losses, from_checkpoint(HYBRID).losses) <= TOLERANCE
    stages = built(run)
    assert [number for stage in stages for number in stage] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(stages) == (4 if virtual else 2) and len(stages[0]) > len(stages[-1])


def test_layers_with_a_configuration_of_their_own_train_with_the_losses_of_one_stage(from_checkpoint):
    split = f"--pipeline-model-parallel-size 2 {ANALYTIC} --balanced-pipeline-head-weight 3"
    run = from_checkpoint(HETEROGENEOUS, split, 2)
    assert largest_difference(run.losses, from_checkpoint(HETEROGENEOUS).losses) <= TOLERANCE
    stages = built(run)
    assert [number for stage in stages for number in stage] == [1, 2, 3, 4, 5, 6, 7, 8] and len(stages[0]) > 4


def test_megatron_accepts_the_plan_of_a_mamba_model(tmp_path):
    from megatron.core.models.hybrid import hybrid_layer_allocation as allocation

    pattern = "M-M-M-M*-" * 6 + "/*-"
    flags = f"--hybrid-layer-pattern {pattern} --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    split = f"--pipeline-model-parallel-size 4 {VIRTUAL} {ANALYTIC} --balanced-pipeline-device H100"
    model = "--position-embedding-type none --hidden-size 512 --bf16"
    run = dry_run(tmp_path, [*TINY, *f"{flags} {model} {split}".split()], 4)
    assert run.status == 0, run.output
    (planned,) = re.findall(r"--hybrid-layer-pattern '(.*)'", run.output)
    assert planned.replace("|", "") == pattern
    assert allocation.get_hybrid_total_pipeline_segment_count(planned) == 8
    assert allocation.get_hybrid_total_layer_count(planned) == 54
