"""The models and batches that are trained, on two CPU cores and on two GPUs."""

from __future__ import annotations

from dataclasses import replace

from quickstart.launch import Size
from quickstart.packed.jobs import BLEND, Case

CORPUS_BYTES = 12_000_000  # enough for a tokenizer to learn the 64k entries of a GPU's model

# A head of about nine layers, so that the split pays. Many tokens and a narrow model have operations that are long enough to be
# steady; a larger head would have the other stage wait longer, and a core that has waited computes more slowly for a while.
CPU = Size(
    layers=16,
    hidden=128,
    heads=4,
    vocabulary=24_576,
    sequence=128,
    micro_batch=8,
    microbatches=8,
    warmup=1,
    pairs=12,
)
# GPUs need wider layers and more tokens before arithmetic, not launching kernels, takes the time.
GPU = replace(
    CPU, hidden=1024, heads=16, vocabulary=65_536, sequence=1024, micro_batch=4, microbatches=16, warmup=5, pairs=50
)

# Few and narrow layers, a small vocabulary and long documents, so that attention takes the time. A bin of many documents on each
# of two ranks: stock Megatron deals one of them long documents and the other short ones, packing gives both their part of either.
PACKED_CPU = Case(
    "packed",
    BLEND,
    sequence=16384,
    pipeline=1,
    data=2,
    microbatches=1,
    pairs=15,
    layers=2,
    heads=4,
    vocabulary=512,
    ffn=64,
    longest=3072,
)
PACKED_GPU = replace(PACKED_CPU, layers=4, hidden=512, heads=8, pairs=30)


def split_size(device: str) -> Size:
    """What the two splits are compared on."""
    return GPU if device == "cuda" else CPU


def packed_case(device: str) -> Case:
    """What chopped and packed documents are compared on."""
    return PACKED_GPU if device == "cuda" else PACKED_CPU


def packed_tokens(case: Case) -> int:
    """Tokens that all steps of a side train on: both sides then see nearly the same documents, once each."""
    return case.steps * case.data * case.microbatches * case.sequence
