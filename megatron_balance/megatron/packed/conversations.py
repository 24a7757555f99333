"""Conversations as documents: what ``--sft`` trains on."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from megatron.training import get_args, get_tokenizer

from megatron_balance.chat.conversations import Conversations, cache_key, open_conversations
from megatron_balance.chat.encoder import Encoder
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.agreement import decide_on_rank_0
from megatron_balance.megatron.packed.sources import Source
from megatron_balance.packing.documents import Documents, cache_folder_of
from megatron_balance.packing.pieces import TRUNCATE, PieceRule
from megatron_balance.packing.splits import Part, bounds

_TOKENIZERS = ("SFTTokenizer", "HuggingFaceTokenizer")


class ConversationSource(Source):
    """Conversations of one file; the assistant's tokens are learned."""

    data: Conversations

    def counted(self, document: int, offset: int, length: int) -> np.ndarray:
        return self.data.said(self.first + document, offset, length)

    def notes(self, rule: PieceRule) -> list[str]:
        lengths = self.documents.lengths
        first_said = self.data.first_said[self.first : self.first + lengths.size]
        notes = []
        if blank := self.data.blank_lines:
            notes.append(f"{self.documents.name}: {blank:,} blank lines were passed over")
        if rule.long_documents == TRUNCATE and (longer := int(np.count_nonzero(lengths > rule.seq_length + 1))):
            silent = int(np.count_nonzero(first_said > rule.seq_length))
            notes.append(
                f"{self.documents.name}: {longer:,} conversations are truncated to {rule.seq_length + 1:,} tokens, {silent:,} of"
                " them before the assistant says anything"
            )
        return notes


def source(path: str | None, part: Part) -> Source:
    """The conversations of a part of a chat file.

    Raises:
        BalanceError: the file or the tokenizer cannot be used; the message says which line or turn.
    """
    if path is None:
        raise BalanceError("--sft reads conversations, --mock-data has none: give --data-path FILE.jsonl")
    data = _conversations(path)
    first, stop = bounds(data.sequence_lengths.size, part)
    return ConversationSource(Documents.of(path, data.sequence_lengths[first:stop]), data, first)


@cache
def _conversations(path: str) -> Conversations:
    args = get_args()
    tokenizer, template = _tokenizer(args)
    key = decide_on_rank_0(f"conversations of {path}", lambda: cache_key(Path(path), Encoder.load(tokenizer, template)))
    folder = Path(args.data_cache_path) if args.data_cache_path is not None else cache_folder_of(path)
    return open_conversations(Path(path), folder / key, tokenizer, template)


def _tokenizer(args: Any) -> tuple[str, str | None]:
    """Name of the Hugging Face tokenizer, and the template in place of its own."""
    if args.tokenizer_type not in _TOKENIZERS or not args.tokenizer_model:
        raise BalanceError(
            f"--sft with --varlen-packing needs the chat template of a Hugging Face tokenizer, this is {args.tokenizer_type}:"
            f" give --tokenizer-type {' or '.join(_TOKENIZERS)}, and its folder or name as --tokenizer-model"
        )
    if args.tokenizer_type == "SFTTokenizer":
        return args.tokenizer_model, _prompt_template(get_tokenizer())
    return args.tokenizer_model, _given_template(getattr(args, "chat_template", None))


def _prompt_template(tokenizer: Any) -> str | None:
    """The template of ``--sft-tokenizer-prompt-format``, which some versions wrap once more."""
    while not hasattr(tokenizer, "_prompt_config") and hasattr(tokenizer, "_tokenizer"):
        tokenizer = tokenizer._tokenizer
    return getattr(getattr(tokenizer, "_prompt_config", None), "custom_chat_template", None)


def _given_template(template: str | None) -> str | None:
    """What ``--chat-template`` says: Jinja, or a file of it."""
    if template is not None and os.path.isfile(template):
        return Path(template).read_text(encoding="utf-8")
    return template
