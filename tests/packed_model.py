"""Gradients and logits of a small GPT on packed documents and on one document a row; ``python packed_model.py STORE``.

Prints JSON: the largest relative difference of any parameter's gradient to that of one document a padded row under stock
attention, for several groupings, and the largest change of another document's logits when one document changes.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from megatron_balance import cpu

cpu.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.megatron.packed.attention import attention_hook
from megatron_balance.megatron.packed.options import TORCH
from megatron_balance.megatron.registry import registry

VOCABULARY, CAPACITY = 64, 40


def build(**changes) -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, persist_layer_norm=False, bias_dropout_fusion=False,
        transformer_impl="local", **changes,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    return GPTModel(config, spec, VOCABULARY, CAPACITY, position_embedding_type="rope")


def packed_logits(model: GPTModel, documents: list[np.ndarray]) -> torch.Tensor:
    """Logits of the inputs of documents in one row, [1, tokens, vocabulary]."""
    row, positions, packed = _row(documents)
    return model(row[None], positions[None], None, packed_seq_params=packed)


def packed_loss(model: GPTModel, documents: list[np.ndarray]) -> torch.Tensor:
    row, positions, packed = _row(documents)
    labels = torch.from_numpy(np.concatenate([document[1:] for document in documents]))
    return model(row[None], positions[None], None, labels=labels[None], packed_seq_params=packed).sum()


def _row(documents: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams]:
    lengths = [document.size - 1 for document in documents]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    tokens = np.concatenate([document[:-1] for document in documents])
    return torch.from_numpy(tokens), torch.cat([torch.arange(length) for length in lengths]), packed


def padded_loss(model: GPTModel, document: np.ndarray) -> torch.Tensor:
    """Stock: one document a row, padded, attention masked in the stock way."""
    length = document.size - 1
    row = torch.zeros(CAPACITY, dtype=torch.int64)
    labels = torch.zeros(CAPACITY, dtype=torch.int64)
    row[:length], labels[:length] = torch.from_numpy(document[:-1]), torch.from_numpy(document[1:])
    mask = torch.ones(CAPACITY, CAPACITY).triu(1).bool()[None, None]
    losses = model(row[None], torch.arange(CAPACITY)[None], mask, labels=labels[None])
    return losses[0, :length].sum()


def gradients(model: GPTModel, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    sum(losses).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def report(**changes) -> dict[str, float]:
    model = build(**changes)
    rng = np.random.default_rng(3)
    documents = [rng.integers(1, VOCABULARY, length) for length in (41, 2, 17, 3, 25, 9, 30, 5, 12)]
    wanted = gradients(model, [padded_loss(model, document) for document in documents])
    groupings = {
        "two bins": [documents[:4], documents[4:]],
        "other bins": [documents[::2], documents[1::2]],
        "one row": [documents],
        "backwards": [documents[::-1]],
    }
    found = {
        name: difference(gradients(model, [packed_loss(model, group) for group in groups]), wanted)
        for name, groups in groupings.items()
    }
    with torch.no_grad():
        before = packed_logits(model, documents)[0]
        changed = [*documents[:4], rng.integers(1, VOCABULARY, 25), *documents[5:]]
        after = packed_logits(model, changed)[0]
    start = sum(document.size - 1 for document in documents[:4])
    moved = (after - before).abs().amax(dim=1)
    found["leaked"] = float(torch.cat((moved[:start], moved[start + 24 :])).max())
    found["changed"] = float(moved[start : start + 24].max())
    return found


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    registry.apply(attention_hook(TORCH))
    print(json.dumps({"full": report(), "window": report(window_size=(6, 0))}))
