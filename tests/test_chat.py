"""Chat files as tokens: what is learned, token by token; what is refused, with line and turn; what a killed pass leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

pytest.importorskip("transformers")

from chat_files import CHATML, EARNEST, FOLDED, FORGETFUL, REWRITING, TAGGED, write_chat, write_tokenizer

from megatron_balance.chat import conversations as conversations_module
from megatron_balance.chat import shards
from megatron_balance.chat.conversations import Conversations, cache_key, open_conversations
from megatron_balance.chat.encoder import Encoder
from megatron_balance.chat.lines import LineError, conversations_of
from megatron_balance.chat.passing import _drive
from megatron_balance.chat.shards import Span
from megatron_balance.errors import BalanceError

FIRST = [
    ("system", "Lady Bracknell."),
    ("user", "A hand-bag?"),
    ("assistant", " Yes, Lady Bracknell."),
    ("user", "The line is immaterial."),
    ("assistant", "assistant"),
]


@pytest.fixture
def tokenizer(tmp_path: Path):
    return lambda template, bytewise=False: os.fspath(write_tokenizer(tmp_path / "tokenizer", template, bytewise))


def opened(path: Path, folder: Path, tokenizer: str, **options) -> Conversations:
    return open_conversations(path, folder / cache_key(path, Encoder.load(tokenizer)), tokenizer, **options)


def shown(tokenizer: str, conversations: Conversations, number: int) -> str:
    """A conversation as text, what is learned in brackets."""
    length = int(conversations.sequence_lengths[number])
    tokens, said = conversations.get(number, 0, length), conversations.said(number, 0, length)
    backend = Encoder.load(tokenizer).tokenizer.backend_tokenizer
    text = ""
    for learned, run in groupby(zip(tokens.tolist(), said.tolist(), strict=True), lambda pair: pair[1]):
        part = "".join(backend.id_to_token(token) for token, _ in run)
        text += f"[{part}]" if learned else part
    return text


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (
            CHATML,
            "<|im_start|>system\nLady Bracknell.<|im_end|>\n<|im_start|>user\nA hand-bag?<|im_end|>\n<|im_start|>assistant\n"
            "[ Yes, Lady Bracknell.<|im_end|>\n]<|im_start|>user\nThe line is immaterial.<|im_end|>\n<|im_start|>assistant\n"
            "[assistant<|im_end|>\n]",
        ),
        (
            FOLDED,
            "<|user|><|system|>Lady Bracknell.\nA hand-bag?<|assistant|>assistant: [Yes, Lady Bracknell. <|end|>]"
            "<|user|>The line is immaterial.<|assistant|>assistant: [assistant <|end|>]",
        ),
        (
            TAGGED,
            "<|user|>Lady Bracknell.<|user|>A hand-bag?<|assistant|>[ Yes, Lady Bracknell.<|end|>]"
            "<|user|>The line is immaterial.<|assistant|>[assistant<|end|>]",
        ),
    ],
    ids=["chatml", "folded", "tagged"],
)
def test_what_the_assistant_says_is_learned(tmp_path, tokenizer, template, wanted):
    name = tokenizer(template)
    conversations = opened(write_chat(tmp_path / "chat.jsonl", FIRST), tmp_path, name)
    assert shown(name, conversations, 0) == wanted


def test_tokens_are_those_of_the_template(tmp_path, tokenizer):
    """Of the whole play, whose dashes and quotes are several bytes each; an assistant's part decodes to what it says."""
    name = tokenizer(CHATML, bytewise=True)
    conversations, loaded = opened(EARNEST, tmp_path, name), Encoder.load(name).tokenizer
    wanted = [each for line in EARNEST.read_bytes().splitlines() for each in conversations_of(line)]
    assert len(wanted) == conversations.sequence_lengths.size == 9  # a line holds two
    for number, conversation in enumerate(wanted):
        messages, length = list(conversation.messages), int(conversations.sequence_lengths[number])
        tokens, said = conversations.get(number, 0, length), conversations.said(number, 0, length)
        assert tokens.tolist() == loaded.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        answers = "".join(f"{each['content']}<|im_end|>\n" for each in messages if each["role"] == "assistant")
        assert loaded.decode(tokens[said]) == answers
        assert int(np.argmax(said)) == conversations.first_said[number]
        assert conversations.get(number, 3, 4).tolist() == tokens[3:7].tolist()


def test_spaces_of_the_assistant_are_learned(tmp_path, tokenizer):
    """Tokens of spaces alone, whose offsets a byte-level tokenizer trims to nothing."""
    name = tokenizer(CHATML, bytewise=True)
    path = write_chat(tmp_path / "chat.jsonl", [("user", "Which?"), ("assistant", "   a    b \u2014   ")])
    conversations = opened(path, tmp_path, name)
    said = conversations.said(0, 0, int(conversations.sequence_lengths[0]))
    tokens = conversations.get(0, 0, said.size)[said]
    assert Encoder.load(name).tokenizer.decode(tokens) == "   a    b \u2014   <|im_end|>\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"messages": [', "line 2: not JSON"),
        (b"[]", "line 2: not a JSON object (a list)"),
        (b'{"text": "no"}', "line 2: no list of messages (the keys are 'text')"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "line 2: not UTF-8 (byte 44 of the line)"),
        (b'{"messages": [{"role": "butler", "content": "Yes, sir."}]}', "line 2: unknown role ('butler' in turn 1"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "line 2: empty turn (turn 1 (user))"),
        (b'{"messages": [{"role": "user", "content": "Lane?"}]}', "line 2: no assistant turn (turns 1 to 1)"),
        (b'{"messages": [{"content": "Lane?"}]}', "line 2: a message without a role (turn 1)"),
        (
            b'{"messages": [{"role": "user", "content": ["Lane?"]}]}',
            "line 2: content that is no text (a list in turn 1)",
        ),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 2: not Unicode (character 1 of turn 1)"),
        (b'{"messages": [{"role": "user", "content": "Lane?", "name": "\\ud83d"}]}', "line 2: not Unicode (turn 1)"),
        (
            b'{"tools": ["\\ud83d"], "messages": [{"role": "assistant", "content": "Sir?"}]}',
            "line 2: not Unicode (the tools)",
        ),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": "play"}]}',
            "line 2: tool calls that are no list of objects (turn 1)",
        ),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": "play"}]}]}',
            "line 2: tool calls that are no list of objects (turn 1)",
        ),
    ],
)
def test_faulty_lines_are_named(tmp_path, tokenizer, line, wanted):
    path = write_chat(tmp_path / "chat.jsonl", FIRST)
    path.write_bytes(path.read_bytes() + line + b"\n\n" + path.read_bytes())
    with pytest.raises(BalanceError, match=re.escape(wanted)) as error:
        opened(path, tmp_path, tokenizer(CHATML))
    assert "1 lines cannot be trained on (1 x " in str(error.value)
    with pytest.raises(BalanceError, match=re.escape(wanted)):  # of what was kept
        opened(path, tmp_path, tokenizer(CHATML))


def test_blank_lines_are_counted(tmp_path, tokenizer):
    path = write_chat(tmp_path / "chat.jsonl", FIRST)
    path.write_bytes(b"\n" + path.read_bytes() + b" \r\n")
    conversations = opened(path, tmp_path, tokenizer(CHATML))
    assert (conversations.blank_lines, conversations.sequence_lengths.size) == (2, 1)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (FORGETFUL, "a template that renders turns otherwise once others follow: those before turn 4"),
        (REWRITING, "a template that renders turns otherwise once others follow: those before turn 3"),
        (CHATML.replace("{% for", "{% set messages = messages[1:] %}{% for", 1), "leaves content out: turn 1 (system)"),
        ("{{ raise_exception('no system') }}", "the template refuses it: up to turn 5, TemplateError: no system"),
    ],
)
def test_templates_that_cannot_be_masked_are_refused(tokenizer, template, wanted):
    (conversation,) = conversations_of(
        json.dumps(
            {
                "messages": [
                    {"role": "system", "content": "Bracknell"},
                    {"role": "user", "content": "A hand-bag?"},
                    {"role": "assistant", "content": "Yes. A hand-bag."},
                    {"role": "user", "content": "Yes."},
                    {"role": "assistant", "content": "In fact."},
                ]
            }
        ).encode()
    )
    with pytest.raises(LineError, match=re.escape(wanted)):
        Encoder.load(tokenizer(template)).encode(conversation)


def test_damaged_shards_are_written_anew_or_refused(tmp_path, tokenizer, capsys):
    name = tokenizer(CHATML)
    conversations = opened(EARNEST, tmp_path, name)
    (shard,) = conversations.folder.glob("shard-*")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    opened(EARNEST, tmp_path, name)
    assert "is cut short; it is written anew" in capsys.readouterr().err
    assert shard.read_bytes() == whole
    shard.write_bytes(whole[:-1] + b"\x81")
    with pytest.raises(BalanceError, match=r"tokens do not have the checksum .* remove it"):
        opened(EARNEST, tmp_path, name).get(0, 0, 1)


def test_other_template_other_tokens(tmp_path, tokenizer):
    first = Encoder.load(tokenizer(CHATML))
    assert cache_key(EARNEST, first) != cache_key(EARNEST, Encoder.load(tokenizer(FOLDED)))
    assert cache_key(EARNEST, first) == cache_key(EARNEST, Encoder.load(tokenizer(CHATML)))


def test_switches_that_a_template_takes_out_of_what_users_say(tokenizer):
    """As Nemotron's does; what the assistant says is never left out."""
    template = CHATML.replace("message['content'] }}<", "message['content'].replace('/think', '').strip() }}<")
    user = {"role": "user", "content": "A hand-bag? /think"}
    (switched,), (said,) = (
        conversations_of(json.dumps({"messages": [user, {"role": "assistant", "content": content}]}).encode())
        for content in ("Yes.", "Yes /think.")
    )
    assert Encoder.load(tokenizer(template)).encode(switched)[1].any()
    with pytest.raises(LineError, match=r"leaves content out: turn 2 \(assistant\)"):
        Encoder.load(tokenizer(template)).encode(said)


def test_few_shards_are_held_open(tmp_path, tokenizer, monkeypatch):
    """Each holds a file descriptor, of which processes have a thousand; a checksum is reckoned once."""
    path = tmp_path / "chat.jsonl"
    path.write_bytes(EARNEST.read_bytes() * 20)
    monkeypatch.setattr(conversations_module, "_MOST_OPENED", 2)
    summed, tokens_of = [], shards.tokens_of
    monkeypatch.setattr(
        shards, "tokens_of", lambda path, part, check: summed.append((path, check)) or tokens_of(path, part, check)
    )
    found = opened(path, tmp_path, tokenizer(CHATML), part_bytes=1 << 12)
    size = found.sequence_lengths.size
    first = [found.get(number, 0, 3).tolist() for number in range(size)]
    assert [found.get(number, 0, 3).tolist() for number in range(size)] == first
    checked = [path for path, check in summed if check]
    assert len(found._opened) == 2 < len(found.parts) == len(checked) == len(set(checked)) < len(summed)


def test_a_full_disk_ends_a_process_of_the_pass_with_its_own_words(tmp_path, tokenizer):
    path = tmp_path / "chat.jsonl"
    path.write_bytes(EARNEST.read_bytes() * 3)
    spans = SimpleQueue()
    spans.put(Span(0, path.stat().st_size))
    with pytest.raises(OSError, match="No such file or directory"):
        _drive(path, tmp_path / "nowhere", (tokenizer(CHATML), None), spans, SimpleQueue())


UNENDING = """
import sys, time
from pathlib import Path
from megatron_balance.chat import passing
from megatron_balance.chat.conversations import open_conversations
class Few(passing.SimpleQueue):  # no part after the fourth: who kills the pass cannot come too late
    given = 0
    def get_nowait(self):
        Few.given += 1
        if Few.given > 4:
            time.sleep(600)
        return super().get_nowait()
passing.SimpleQueue = Few
open_conversations(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], workers=2, part_bytes=int(sys.argv[4]))
"""


def test_a_killed_pass_goes_on(tmp_path, tokenizer):
    """What several processes write is what one writes, and parts that a killed pass finished are not written again."""
    name, path = tokenizer(CHATML), tmp_path / "chat.jsonl"
    path.write_bytes(EARNEST.read_bytes() * 300)
    part_bytes = 1 << 16
    folder = tmp_path / "killed" / cache_key(path, Encoder.load(name))
    command = [sys.executable, "-c", UNENDING, path, folder, name, str(part_bytes)]
    with subprocess.Popen(list(map(os.fspath, command))) as process:
        while len(list(folder.glob("shard-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    kept = {shard: shard.stat().st_mtime_ns for shard in folder.glob("shard-*")}
    resumed = open_conversations(path, folder, name, workers=2, part_bytes=part_bytes)
    assert {shard: shard.stat().st_mtime_ns for shard in kept} == kept
    assert len(resumed.spans) > len(kept)
    alone = open_conversations(path, tmp_path / "alone", name, workers=1)
    assert resumed.sequence_lengths.tolist() == alone.sequence_lengths.tolist()
    for number in range(0, alone.sequence_lengths.size, 97):
        length = int(alone.sequence_lengths[number])
        assert resumed.get(number, 0, length).tolist() == alone.get(number, 0, length).tolist()
        assert resumed.said(number, 0, length).tolist() == alone.said(number, 0, length).tolist()
