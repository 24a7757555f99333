"""Gradients and logits of a small GPT on packed documents and on one document a row: ``packed_model.py FOLDER RANK SIZE``.

Prints JSON: the largest relative difference of any parameter's gradient to that of one document a padded row under stock
attention, for several groupings, and the largest change of another document's logits when one document changes. On more than
one rank, which share out each document by context parallelism: against the gradients that one rank has left in FOLDER. On one
rank by flash-attn's interface, too, behind which torch computes here.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path

import flash_attention
import numpy as np
import torch

from megatron_balance import cpu

cpu.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.megatron.packed import prediction
from megatron_balance.megatron.packed.attention import attention_hook
from megatron_balance.megatron.packed.context import LOCAL_ATTENTION, places_of
from megatron_balance.megatron.packed.options import FLASH, TORCH
from megatron_balance.megatron.packed.totals import rolled_shares
from megatron_balance.megatron.registry import registry

VOCABULARY, CAPACITY = 64, 40


DEPTHS = 2  # of multi-token prediction
PARTS = 4  # of each document with two context-parallel ranks


def build(**changes) -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, persist_layer_norm=False, bias_dropout_fusion=False,
        transformer_impl="local", calculate_per_token_loss=True, **changes,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    deeper = {}
    if config.mtp_num_layers:
        deeper["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, VOCABULARY, CAPACITY, position_embedding_type="rope", **deeper)


def packed_logits(model: GPTModel, documents: list[np.ndarray]) -> torch.Tensor:
    """Logits of the inputs of documents in one row, [1, tokens, vocabulary]."""
    row, _, _, positions, packed = _row(documents)
    return model(row[None], positions[None], None, packed_seq_params=packed)


def packed_loss(model: GPTModel, documents: list[np.ndarray]) -> torch.Tensor:
    """Sum of the losses of documents in one row; with context parallelism of this rank's tokens."""
    row, labels, mask, positions, packed = _row(documents)
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        own = places_of(packed.lengths, size, parallel_state.get_context_parallel_rank())
        row, labels, mask, positions = row[own], labels[own], mask[own], positions[own]
    losses = model(
        row[None], positions[None], None, labels=labels[None], loss_mask=mask[None], packed_seq_params=packed
    )
    return (losses * mask).sum()


def _row(documents: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PackedSeqParams]:
    """Inputs, labels, which of them count, positions and bounds; documents padded to `PARTS` with context parallelism."""
    parts = PARTS if parallel_state.get_context_parallel_world_size() > 1 else 1
    lengths = [-(-(document.size - 1) // parts) * parts for document in documents]
    padding = [length - (document.size - 1) for length, document in zip(lengths, documents, strict=True)]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    packed.lengths = lengths
    rows = [
        np.concatenate([np.pad(part(document), (0, pad)) for document, pad in zip(documents, padding, strict=True)])
        for part in (lambda d: d[:-1], lambda d: d[1:], lambda d: np.ones(d.size - 1, np.float32))
    ]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return *map(torch.from_numpy, rows), positions, packed


def padded_loss(model: GPTModel, document: np.ndarray) -> torch.Tensor:
    """Stock: one document a row, padded, attention masked in the stock way."""
    length = document.size - 1
    row = torch.zeros(CAPACITY, dtype=torch.int64)
    labels = torch.zeros(CAPACITY, dtype=torch.int64)
    row[:length], labels[:length] = torch.from_numpy(document[:-1]), torch.from_numpy(document[1:])
    mask = torch.ones(CAPACITY, CAPACITY).triu(1).bool()[None, None]
    counts = (torch.arange(CAPACITY) < length).float()[None]
    losses = model(row[None], torch.arange(CAPACITY)[None], mask, labels=labels[None], loss_mask=counts)
    return losses[0, :length].sum()


def gradients(model: GPTModel, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of each parameter, over all context-parallel ranks."""
    model.zero_grad()
    sum(losses).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    for gradient in found:
        torch.distributed.all_reduce(gradient)
    return found


def difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


DRAWN = np.random.default_rng(3)
DOCUMENTS = [DRAWN.integers(1, VOCABULARY, length) for length in (41, 2, 17, 3, 25, 9, 30, 5, 12)]


def report(folder: Path, name: str, **changes) -> dict[str, float]:
    model, path = build(**changes), folder / f"{name}.npz"
    alone = parallel_state.get_context_parallel_world_size() == 1
    if alone:
        wanted = gradients(model, [padded_loss(model, document) for document in DOCUMENTS])
        np.savez(path, *wanted)
    else:
        with np.load(path) as kept:
            wanted = [torch.from_numpy(kept[each]) for each in kept.files]
    groupings = {
        "two bins": [DOCUMENTS[:4], DOCUMENTS[4:]],
        "other bins": [DOCUMENTS[::2], DOCUMENTS[1::2]],
        "one row": [DOCUMENTS],
        "backwards": [DOCUMENTS[::-1]],
    }
    found = {
        name: difference(gradients(model, [packed_loss(model, group) for group in groups]), wanted)
        for name, groups in groupings.items()
    }
    if not alone or model.config.mtp_num_layers:  # changes no logit; with it Megatron 0.16 needs labels
        return found
    return found | leaks(model)


def leaks(model: GPTModel) -> dict[str, float]:
    """How far logits move when the fifth document changes: of the others, and its own."""
    with torch.no_grad():
        before = packed_logits(model, DOCUMENTS)[0]
        changed = [*DOCUMENTS[:4], DRAWN.integers(1, VOCABULARY, 25), *DOCUMENTS[5:]]
        after = packed_logits(model, changed)[0]
    start = sum(document.size - 1 for document in DOCUMENTS[:4])
    moved = (after - before).abs().amax(dim=1)
    return {
        "leaked": float(torch.cat((moved[:start], moved[start + 24 :])).max()),
        "changed": float(moved[start : start + 24].max()),
    }


def shares() -> list[float]:
    return rolled_shares(np.array([document.size - 1 for document in DOCUMENTS]), DEPTHS)


def by_flash(folder: Path) -> dict[str, dict[str, float]]:
    """With flash-attn's interface, once deterministic and once within windows; whether each of its calls was deterministic."""
    registry.undo(attention_hook(TORCH))
    sys.modules["flash_attn"] = flash_attention
    registry.apply(attention_hook(FLASH))
    reports = {}
    for name, changes in {"flash": {"deterministic_mode": True}, "flash window": {"window_size": (6, 0)}}.items():
        flash_attention.asked_deterministic.clear()
        reports[name] = report(folder, name, **changes)
        reports[name]["deterministic"] = [*flash_attention.asked_deterministic]
    return reports


if __name__ == "__main__":
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = f"file://{folder / f'store of {size}'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    registry.apply(attention_hook(TORCH))
    registry.apply(LOCAL_ATTENTION)
    registry.apply(prediction.ROLL)
    if prediction.rescales():
        registry.apply(prediction.weights_hook(shares))
    kinds = {"full": {}, "window": {"window_size": (6, 0)}, "prediction": {"mtp_num_layers": DEPTHS}}
    sizes = {"context_parallel_size": size}
    reports = {name: report(folder, name, **sizes, **changes) for name, changes in kinds.items()}
    if size == 1:
        reports |= by_flash(folder)
    print(json.dumps(reports))
