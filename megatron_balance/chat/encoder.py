"""A conversation as tokens, by the chat template of a Hugging Face tokenizer, and which of them the assistant says."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_balance.chat.lines import ASSISTANT, Conversation, LineError, Message
from megatron_balance.errors import BalanceError

_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "\u2063what the assistant says\u2063"


@dataclass(frozen=True, eq=False)
class Encoder:
    """Renders conversations as ``apply_chat_template`` does, and knows the assistant's part.

    Where the template marks it (``{% generation %}``), that is its part. Else it reaches from the end of the prompt of a turn (the
    rendering of all before it with ``add_generation_prompt``, or up to the content, where the template knows no such prompt)
    to the end of the turn, what ends the turn included. A token whose last character is in it is learned.

    Attributes:
        tokenizer: of transformers, a fast one.
        template: Jinja.
    """

    tokenizer: Any
    template: str

    @classmethod
    def load(cls, tokenizer: str, template: str | None = None) -> Encoder:
        """The tokenizer of a folder or of the Hugging Face hub, with its own template or another.

        Raises:
            BalanceError: it cannot be loaded, has no template, or tells no offsets.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise BalanceError(
                f"chat templates need transformers ({error}): pip install 'megatron-balance[chat]'"
            ) from error
        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError, TypeError, KeyError) as error:
            shown = str(error).strip().splitlines()
            raise BalanceError(
                f"the tokenizer {tokenizer} cannot be loaded ({shown[0] if shown else type(error).__name__}): pass the"
                " folder or name of a Hugging Face tokenizer"
            ) from error
        if not loaded.is_fast:
            raise BalanceError(
                f"the tokenizer {tokenizer} does not tell which characters a token stands for: pass a fast one"
                " (tokenizer.json)"
            )
        template = template or loaded.chat_template
        if not isinstance(template, str):
            raise BalanceError(f"the tokenizer {tokenizer} has not one chat template: add chat_template.jinja to it")
        return cls(loaded, template)

    @property
    def identity(self) -> str:
        """Hexadecimal digest of all that tokens depend on."""
        tokenizer = self.tokenizer
        parts = (tokenizer.backend_tokenizer.to_str(), self.template, str(sorted(tokenizer.special_tokens_map.items())))
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Its tokens, int64 of shape [tokens], and which are the assistant's, bool of shape [tokens].

        Raises:
            LineError: the template refuses it, leaves something out, or renders a turn otherwise once another follows.
        """
        tokens, said = self._tagged(conversation) if _TAGS.search(self.template) else self._split(conversation)
        if not said.any():
            raise LineError("no assistant token", f"turns {conversation.first_turn} and on")
        return tokens, said

    def _tagged(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        everything = len(conversation.messages)
        _check_content(conversation, range(everything), self._render(conversation, everything))
        found = self.tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=conversation.tools,
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return np.asarray(found["input_ids"], np.int64), np.asarray(found["assistant_masks"], bool)

    def _split(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        everything = len(conversation.messages)
        text = self._render(conversation, everything)
        said = np.zeros(len(text) + 1, bool)  # of each character; the last is before the first
        seen, answered = "", 0  # the rendering of what was looked at, and how many messages it is of
        for place, message in enumerate(conversation.messages):
            if message["role"] == ASSISTANT:
                before = self._render(conversation, place) if place else ""
                _check_kept(before, seen, conversation, place - 1)
                _check_content(conversation, range(answered, place), before[len(seen) :])
                start, seen = self._turn(conversation, place, before)
                answered = place + 1
                said[start : len(seen)] = True
        _check_kept(text, seen, conversation, everything - 1)
        _check_content(conversation, range(answered, everything), text[len(seen) :])
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # Offsets may leave spaces out, and bytes of a character share its end: ends alone put every token in its place.
        ends = np.maximum.accumulate(np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 1])
        return np.asarray(encoded["input_ids"], np.int64), said[ends - 1]

    def _turn(self, conversation: Conversation, place: int, before: str) -> tuple[int, str]:
        """Where the assistant's part of message ``place`` begins behind what is ``before`` it, and the rendering up to its end."""
        text = self._render(conversation, place + 1)
        _check_kept(text, before, conversation, place)
        _check_content(conversation, range(place, place + 1), text[len(before) :])
        prompt = self._render(conversation, place, add_generation_prompt=True) if place else before
        if len(prompt) > len(before) and prompt.startswith(before) and text.startswith(prompt):
            return len(prompt), text
        other = dict(conversation.messages[place], content=_PROBE)
        start = self._render(conversation, place, other).find(_PROBE, len(before))
        if start < 0 or not conversation.messages[place].get("content"):
            raise LineError(
                "a template that does not show where the assistant begins", f"turn {conversation.first_turn + place}"
            )
        return start, text

    def _render(
        self, conversation: Conversation, turns: int, *last: Message, add_generation_prompt: bool = False
    ) -> str:
        """The first ``turns`` messages, and perhaps another, as text."""
        try:
            return self.tokenizer.apply_chat_template(
                [*conversation.messages[:turns], *last],
                tools=conversation.tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # whatever a template raises
            turn = conversation.first_turn + turns + len(last) - 1
            raise LineError("the template refuses it", f"up to turn {turn}, {type(error).__name__}: {error}") from error


def _check_kept(text: str, seen: str, conversation: Conversation, place: int) -> None:
    if not text.startswith(seen):
        raise LineError(
            "a template that renders turns otherwise once others follow",
            f"those before turn {conversation.first_turn + place}",
        )


def _place_of(content: str, role: str, text: str, start: int) -> tuple[int, int]:
    """Where a message's content begins and ends in its rendering; (-1, -1) if it is left out.

    Nemotron's template takes its switches out of what others than the assistant say.
    """
    without = content.replace("/think", "").replace("/no_think", "").strip()
    for shown in (content.strip(),) if role == ASSISTANT else (content.strip(), without):
        if (found := text.find(shown, start)) >= 0:
            return found, found + len(shown)
    return -1, -1


def _check_content(conversation: Conversation, places: range, text: str) -> None:
    """Find the content of some messages in their rendering, one behind the other."""
    end = 0
    for place in places:
        message = conversation.messages[place]
        names = [str((call.get("function") or call).get("name", "")) for call in message.get("tool_calls") or ()]
        for content in (message.get("content") or "", *names):
            _, end = _place_of(content, message["role"], text, end)
            if end < 0:
                turn = conversation.first_turn + place
                raise LineError("a template that leaves content out", f"turn {turn} ({message['role']})")
