"""What `--varlen-packing` cannot go with is refused with the reason, on real command lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_balance.errors import BalanceError

GOOD = "--varlen-packing --calculate-per-token-loss"
REFUSED = {
    f"{GOOD} --reset-position-ids": "--reset-position-ids",
    f"{GOOD} --reset-attention-mask": "--reset-attention-mask",
    f"{GOOD} --dataloader-inter-document-masking": "--dataloader-inter-document-masking",
    f"{GOOD} --hybrid-context-parallel": "--hybrid-context-parallel",
    f"{GOOD} --fim-data": "--fim-data",
    f"{GOOD} --retro-add-retriever": "--retro-add-retriever",
    f"{GOOD} --moe-router-load-balancing-type seq_aux_loss": "seq_aux_loss",
    f"{GOOD} --moe-router-load-balancing-type sinkhorn": "sinkhorn",
    f"{GOOD} --moe-router-load-balancing-type quantile_balancing": "quantile_balancing",
    f"{GOOD} --dynamic-context-parallel": "--dynamic-context-parallel",
    f"{GOOD} --sequence-packing-scheduler dp_balanced": "--sequence-packing-scheduler",
    f"{GOOD} --full-validation": "give --multiple-validation-sets, too",
    f"{GOOD} --full-validation --multiple-validation-sets --micro-batch-size 2": "give --eval-micro-batch-size 1",
    f"{GOOD} --object-storage-cache-path cache": "--object-storage-cache-path",
    f"{GOOD} --logits-save-dir teacher": "--logits-save-dir",
    f"{GOOD} --tensor-parallel-num-weight-shards 2": "--tensor-parallel-num-weight-shards 2",
    f"{GOOD} --expert-tensor-parallel-num-weight-shards 2": "--expert-tensor-parallel-num-weight-shards 2",
    f"{GOOD} --load msc://profile/run": "--load of a storage that is no file system",
    f"{GOOD} --overlap-moe-expert-parallel-comm": "--overlap-moe-expert-parallel-comm",
    f"{GOOD} --dataloader-type cyclic": "--dataloader-type",
    f"{GOOD} --dataloader-type external": "--dataloader-type",
    f"{GOOD} --mtp-num-layers 1 --mtp-use-repeated-layer": "--varlen-packing does not know the cost",
    f"{GOOD} --use-torch-fsdp2": "--use-torch-fsdp2",
    f"{GOOD} --logits-load-dir teacher": "--logits-load-dir",
    f"{GOOD} --decrease-batch-size-if-needed": "--decrease-batch-size-if-needed",
    f"{GOOD} --non-persistent-ckpt-type local": "--non-persistent-ckpt-type local",
    f"{GOOD} --save msc://profile/run": "--save of a storage that is no file system",
    f"{GOOD} --phase-transition-iterations 3": "--phase-transition-iterations",
    f"{GOOD} --iterations-to-skip 3": "--iterations-to-skip",
    f"{GOOD} --check-for-spiky-loss": "--check-for-spiky-loss",
    f"{GOOD} --cuda-graph-impl full_iteration": "--cuda-graph-impl full_iteration",
    f"{GOOD} --cuda-graph-impl local": "--cuda-graph-impl local",
    f"{GOOD} --cuda-graph-impl transformer_engine --cuda-graph-modules mlp attn": "--cuda-graph-impl transformer_engine",
    f"{GOOD} --enable-cuda-graph": "--enable-cuda-graph",
    f"{GOOD} --external-cuda-graph --cuda-graph-scope attn": "--external-cuda-graph",
    f"{GOOD} --moe-expert-capacity-factor 1.0": "--moe-expert-capacity-factor",
    f"{GOOD} --position-embedding-type mrope": "--position-embedding-type mrope",
    f"{GOOD} --softmax-type learnable": "--softmax-type",
    f"{GOOD} --varlen-packing-shapes variable --tp-comm-overlap": "--tp-comm-overlap",
    f"{GOOD} --varlen-packing-shapes variable --cuda-graph-impl local": "--cuda-graph-impl",
    f"{GOOD} --varlen-packing-shapes variable --fine-grained-activation-offloading": "--fine-grained-activation-offloading",
    f"{GOOD} --varlen-packing-shapes variable --num-experts 4 --moe-token-dispatcher-type flex"
    " --moe-flex-dispatcher-backend hybridep": "--moe-flex-dispatcher-backend hybridep",
    f"{GOOD} --varlen-packing-shapes variable --num-experts 4": "--moe-token-dispatcher-type allgather",
    f"{GOOD} --varlen-packing-shapes fixed --varlen-packing-micro-batches +2": "--varlen-packing-shapes fixed",
    f"{GOOD} --num-experts 4 --varlen-packing-micro-batches +2": "--moe-token-dispatcher-type allgather",
    "--varlen-packing-shapes fixed": "does nothing without --varlen-packing",
    "--varlen-packing-micro-batches +2": "does nothing without --varlen-packing",
    "--varlen-packing": "needs --calculate-per-token-loss",
    "--varlen-packing-attention torch": "does nothing without --varlen-packing",
    "--varlen-packing-long-documents drop": "does nothing without --varlen-packing",
}
TAKEN = [
    GOOD,
    f"{GOOD} --context-parallel-size 2",
    f"{GOOD} --mtp-num-layers 1",
    f"{GOOD} --spec my.layers SPEC",
    f"{GOOD} --hybrid-layer-pattern M*-",
    f"{GOOD} --full-validation --multiple-validation-sets --micro-batch-size 1",
    f"{GOOD} --load msc://profile/run --finetune",
    f"{GOOD} --tensor-parallel-num-weight-shards 2 --tensor-model-parallel-size 2",
    f"{GOOD} --cuda-graph-impl transformer_engine --cuda-graph-modules mlp",
]


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    pytest.importorskip("megatron.training")
    script, lines = Path(__file__).with_name("packed_refusals.py"), [*TAKEN, *REFUSED]
    command = [sys.executable, "-W", "ignore", str(script), json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("line", TAKEN)
def test_what_packs_is_not_refused(answers, line):
    if line != GOOD and answers[line] == "unknown to this Megatron":
        pytest.skip(f"this Megatron has no such flag: {line}")
    assert answers[line] == ""


@pytest.mark.parametrize("line", REFUSED)
def test_refusal_names_the_flag(answers, line):
    if answers[line] == "unknown to this Megatron":
        pytest.skip(f"this Megatron has no such flag: {line}")
    assert REFUSED[line] in answers[line]


@pytest.mark.parametrize(
    ("asked", "implementation", "on_gpu", "installed", "answer"),
    [
        ("auto", "transformer_engine", True, True, "te"),
        ("auto", "local", True, True, "flash"),
        ("auto", "local", True, False, "torch"),
        ("auto", "local", False, True, "torch"),
        ("flash", "local", True, True, "flash"),
        ("flash", "local", True, False, "needs the package flash-attn"),
        ("flash", "local", False, True, "needs a GPU"),
        ("te", "local", True, True, "needs the layers of Transformer Engine"),
        ("torch", "transformer_engine", True, True, "is for the local layers"),
    ],
)
def test_attention_that_cannot_be_had_is_refused(monkeypatch, asked, implementation, on_gpu, installed, answer):
    pytest.importorskip("torch")
    from megatron_balance.megatron.packed.attention import chosen

    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    try:
        assert chosen(asked, implementation, on_gpu) == answer
    except BalanceError as error:
        assert answer in str(error)


def test_flash_is_not_for_sequences_that_ranks_share(monkeypatch):
    pytest.importorskip("torch")
    from megatron_balance.megatron.packed.attention import chosen

    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert chosen("auto", "local", True, 2) == "torch"
    with pytest.raises(BalanceError, match="--context-parallel-size 2"):
        chosen("flash", "local", True, 2)
