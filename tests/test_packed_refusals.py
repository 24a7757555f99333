"""What `--varlen-packing` cannot go with is refused with the reason, on real command lines."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    f"{GOOD} --use-megatron-fsdp --pipeline-model-parallel-size 2": "--use-megatron-fsdp with --pipeline-model-parallel-size 2",
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
def asked() -> dict[str, list[str]]:
    pytest.importorskip("megatron.training")
    script, lines = Path(__file__).with_name("packed_refusals.py"), [*TAKEN, *REFUSED]
    cases = [case[:4] for case in (*ATTENTION, LATENT)]
    command = [sys.executable, "-W", "ignore", str(script), json.dumps({"lines": lines, "attention": cases})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers(asked) -> dict[str, str]:
    return dict(zip([*TAKEN, *REFUSED], asked["lines"], strict=True))


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


TE, LOCAL = "--transformer-impl transformer_engine --bf16", "--transformer-impl local --bf16"
FLASH = "--varlen-packing-attention flash"
MLA = "--multi-latent-attention --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
CP = "--context-parallel-size 2 --cp-comm-type"
AMPERE, HOPPER, WORKSTATION, VOLTA = "8.0", "9.0", "12.0", "7.0"
# flags, GPU, flash-attn, Transformer Engine, what attends or what is said
ATTENTION = [
    (LOCAL, None, None, None, "torch"),
    (LOCAL, HOPPER, "2.8.3.post1", None, "flash"),
    (LOCAL, HOPPER, None, None, "torch: flash-attn would need the package flash-attn, which is not installed"),
    (LOCAL, HOPPER, "2.4.0", None, "torch: flash-attn would need flash-attn 2.4.1"),
    (LOCAL, VOLTA, "2.8.3", None, "torch: flash-attn would need a GPU of Ampere"),
    ("--transformer-impl local", HOPPER, "2.8.3", None, "torch: flash-attn would need --bf16 or --fp16"),
    (f"{LOCAL} --kv-channels 256", HOPPER, "2.8.3", None, "flash"),
    (f"{LOCAL} --kv-channels 288", HOPPER, "2.8.3", None, "torch: flash-attn would need heads of up to 256"),
    (
        f"{LOCAL} --kv-channels 256",
        WORKSTATION,
        "2.8.3",
        None,
        "torch: flash-attn would need heads of up to 192 on this GPU",
    ),
    (f"{LOCAL} --kv-channels 256 --attention-dropout 0", WORKSTATION, "2.8.3", None, "flash"),
    (
        f"{LOCAL} --hidden-size 1024 --num-attention-heads 2",
        HOPPER,
        "2.8.3",
        None,
        "torch: flash-attn would need heads",
    ),
    (
        f"{LOCAL} --context-parallel-size 2",
        HOPPER,
        "2.8.3",
        None,
        "torch: flash-attn would need --context-parallel-size 1",
    ),
    (f"{LOCAL} {FLASH}", HOPPER, "2.8.3", None, "flash"),
    (f"{LOCAL} {FLASH}", None, "2.8.3", None, "refused: --varlen-packing-attention flash needs a GPU: give torch"),
    (f"{LOCAL} {FLASH}", HOPPER, None, None, "refused: --varlen-packing-attention flash needs the package flash-attn"),
    (
        f"{LOCAL} {FLASH} --context-parallel-size 2",
        HOPPER,
        "2.8.3",
        None,
        "refused: --varlen-packing-attention flash needs",
    ),
    (
        f"--transformer-impl local {FLASH}",
        HOPPER,
        "2.8.3",
        None,
        "refused: --varlen-packing-attention flash needs --bf16",
    ),
    (f"{LOCAL} --varlen-packing-attention torch", HOPPER, "2.8.3", None, "torch"),
    (
        f"{LOCAL} --varlen-packing-attention te",
        HOPPER,
        "2.8.3",
        None,
        "refused: --varlen-packing-attention te needs the layers",
    ),
    (
        f"{TE} --varlen-packing-attention torch",
        HOPPER,
        None,
        "2.14",
        "refused: --varlen-packing-attention torch is for the local",
    ),
    (TE, HOPPER, None, "2.1", "te"),
    (TE, None, None, None, "te"),
    (
        "--transformer-impl transformer_engine",
        HOPPER,
        "2.8.3",
        "2.10.0",
        "refused: --varlen-packing: Transformer Engine 2.10 has no",
    ),
    ("--transformer-impl transformer_engine", HOPPER, "2.8.3", "2.11.0", "te"),
    (f"{TE} --attention-backend unfused", HOPPER, "2.8.3", "2.10", "(no flash: --attention-backend unfused;"),
    (f"{TE} --attention-backend unfused", HOPPER, "2.8.3", "2.11", "te"),
    (f"{TE} --attention-backend fused", HOPPER, None, "2.1", "te"),
    ("--transformer-impl transformer_engine --fp16", VOLTA, None, "2.10", "a GPU before Ampere"),
    ("--transformer-impl transformer_engine --fp16", VOLTA, None, "2.11", "te"),
    (f"{TE} --qk-clip", HOPPER, "2.8.3", "2.10", "no fused: --qk-clip or --log-max-attention-logit"),
    (f"{TE} --log-max-attention-logit", HOPPER, "2.8.3", "2.9", "no fused: --qk-clip or --log-max-attention-logit"),
    (f"{TE} --log-max-attention-logit", HOPPER, None, "2.11", "te"),
    (TE, WORKSTATION, None, "2.9", "no fused: this GPU (sm120)"),
    (TE, WORKSTATION, "2.8.3", "2.9", "te"),
    (f"{TE} --deterministic-mode", AMPERE, None, "2.10", "no fused: a GPU before Hopper"),
    (f"{TE} --deterministic-mode", AMPERE, "2.8.3", "2.10", "te"),
    (TE, AMPERE, None, "2.10", "no fused: a GPU before Hopper; no unfused: Transformer Engine before 2.11): take"),
    (TE, AMPERE, None, "2.11", "te"),
    (f"{TE} {CP} p2p", AMPERE, None, "2.18", "no unfused: context parallelism): change one of these"),
    (f"{LOCAL} --kv-channels 224 --attention-dropout 0", WORKSTATION, "2.8.3", None, "heads of up to 192 on this GPU"),
    (f"{LOCAL} --kv-channels 256 --attention-dropout 0", WORKSTATION, "2.5.4", None, "heads of up to 192 on this GPU"),
    (f"{LOCAL} --kv-channels 256 --attention-dropout 0", AMPERE, "2.5.4", None, "flash"),
    (f"{TE} --deterministic-mode", "10.0", None, "2.9", "no fused: --deterministic-mode on Blackwell"),
    (f"{TE} --deterministic-mode", "10.0", None, "2.11", "te"),
    (f"{TE} {CP} p2p", HOPPER, None, "2.1", "te"),
    (f"{TE} {CP} a2a", HOPPER, None, "2.9", "--cp-comm-type a2a on Transformer Engine 2.9"),
    (f"{TE} {CP} a2a", HOPPER, None, "2.10", "te"),
    (f"{TE} {CP} p2p a2a", HOPPER, None, "2.9", "take p2p, or Transformer Engine 2.10 or newer"),
    (
        f"{TE} {CP} all_gather",
        HOPPER,
        None,
        "2.17",
        "take p2p (or a2a from 2.10 on), or Transformer Engine 2.18 or newer",
    ),
    (f"{TE} {CP} all_gather", HOPPER, None, "2.18", "te"),
    (f"{TE} {CP} a2a+p2p", HOPPER, None, "2.18", "--cp-comm-type a2a+p2p"),
    (f"{TE} --cp-comm-type a2a", HOPPER, None, "2.9", "te"),
    (f"{TE} {CP} p2p --window-size 127,0", HOPPER, None, "2.18", "no sliding windows with --context-parallel-size 2"),
    (f"{TE} {CP} a2a --window-size 127,0", HOPPER, None, "2.18", "te"),
    (f"{TE} {CP} a2a --spec my.layers SPEC", HOPPER, None, "2.9", "te"),
]
LATENT = (f"{LOCAL} {MLA}", HOPPER, "2.8.3", None)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: " ".join(map(str, case[:4])))
def test_attention_is_what_can_be_had_or_refused(asked, case):
    answer = asked["attention"][ATTENTION.index(case)]
    if answer == "unknown to this Megatron":
        pytest.skip(f"this Megatron has no such flag: {case[0]}")
    expected = case[-1]
    assert answer == expected if expected in ("te", "flash", "torch") else expected in answer


def test_latent_attention_has_flash_where_megatron_pads_its_values(asked):
    from megatron.core.transformer import multi_latent_attention

    padded = hasattr(multi_latent_attention, "_prepare_mla_core_attention_value")
    answer = asked["attention"][-1]
    assert answer == "flash" if padded else answer.startswith("torch: flash-attn would need heads whose values")


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"flash_attn/cute/__init__.py": ""}, "has no attribute 'flash_attn_varlen_func'"),
        ({"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')"}, "undefined symbol: _ZN3c10"),
    ],
    ids=["flash-attn-4", "a build for another torch"],
)
def test_flash_attn_that_cannot_be_imported_is_none(monkeypatch, tmp_path, files, fault):
    pytest.importorskip("torch")
    from megatron_balance.megatron.packed.backends import flash_attn

    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = flash_attn()
    sys.modules.pop("flash_attn", None)
    assert found.version is None and fault in found.fault
