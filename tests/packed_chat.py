"""Gradients of a small GPT on packed conversations and on one a padded row; ``python packed_chat.py STORE CHAT TOKENIZER FOLDER``.

Prints JSON: the largest relative difference of any parameter's gradient, the labels that counted in either, and the same difference
when all labels count.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

store, chat, tokenizer, folder = sys.argv[1:]

import packed_model
from megatron.core import parallel_state, tensor_parallel
from megatron.training import global_vars
from transformers import AutoTokenizer

from megatron_balance.chat.conversations import open_conversations
from megatron_balance.megatron.packed import conversations, items, step
from megatron_balance.megatron.packed.attention import attention_hook
from megatron_balance.megatron.packed.options import TORCH
from megatron_balance.megatron.registry import registry
from megatron_balance.packing.documents import Blend, Documents
from megatron_balance.packing.epoch import Epoch
from megatron_balance.packing.pieces import TRUNCATE, PieceRule

CAPACITY = 250  # the longest conversation is truncated


def packed_losses(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of each bin, from the data set through the forward step's own batch."""
    data = open_conversations(Path(chat), Path(folder), tokenizer)
    source = conversations.ConversationSource(Documents.of(chat, data.sequence_lengths), data, 0)
    rule = PieceRule(CAPACITY, 1, TRUNCATE)
    epoch = Epoch.of(Blend.of([source.documents]), rule)
    bins = items.PackedDataset(epoch, [source], rule, epoch.num_bins, None, True)
    losses = []
    for batch in (step.next_batch(iter([bins[number]]), None) for number in range(len(bins))):
        loss = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
        losses.append((loss * batch.loss_mask).sum())
        counted.append(int(batch.loss_mask.sum()))
    return losses


def padded_losses(model: torch.nn.Module, everything: bool) -> list[torch.Tensor]:
    """Of each conversation in a row of its own; what follows ``<|im_start|>assistant\\n`` up to ``<|im_end|>\\n`` counts."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    losses = []
    for line in Path(chat).read_text(encoding="utf-8").splitlines():
        tokens = np.array(loaded.apply_chat_template(json.loads(line)["messages"], return_dict=True)["input_ids"])
        heading, end = loaded("<|im_start|>assistant\n")["input_ids"], loaded("<|im_end|>\n")["input_ids"]
        said, speaks = np.zeros(tokens.size, bool), False
        for place in range(tokens.size):
            said[place] = speaks
            if tokens[: place + 1][-len(heading) :].tolist() == heading:
                speaks = True
            elif speaks and tokens[: place + 1][-len(end) :].tolist() == end:
                speaks = False
        tokens, said = tokens[: CAPACITY + 1], said[: CAPACITY + 1] | everything
        length = tokens.size - 1
        row, labels = torch.zeros(2, CAPACITY, dtype=torch.int64)
        row[:length], labels[:length] = torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:])
        mask = torch.ones(CAPACITY, CAPACITY).triu(1).bool()[None, None]
        loss = model(row[None], torch.arange(CAPACITY)[None], mask, labels=labels[None])
        losses.append((loss[0, :length] * torch.from_numpy(said[1:])).sum())
        counted.append(int(said[1:].sum()))
    return losses


torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
arguments = {"seq_length": CAPACITY, "eod_mask_loss": False, "virtual_pipeline_model_parallel_size": None}
global_vars.set_args(SimpleNamespace(**arguments, pipeline_model_parallel_size=1))
packed_model.VOCABULARY, packed_model.CAPACITY = 400, CAPACITY
registry.apply(attention_hook(TORCH))
model = packed_model.build()

counted: list[int] = []
found = packed_model.gradients(model, packed_losses(model))
packed_labels = sum(counted)
counted.clear()
wanted = packed_model.gradients(model, padded_losses(model, everything=False))
padded_labels = sum(counted)
everything = packed_model.gradients(model, padded_losses(model, everything=True))
difference = packed_model.difference
print(json.dumps([difference(found, wanted), packed_labels, padded_labels, difference(found, everything)]))
