"""The conversations in a line of chat JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]
SYSTEM, ASSISTANT = "system", "assistant"
ROLES = (SYSTEM, "developer", "user", ASSISTANT, "tool")


class LineError(ValueError):
    """Why a line cannot be trained on.

    Attributes:
        kind: what is wrong, in words that count equal mistakes together.
        detail: where and how.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Conversation:
    """Turns that see each other.

    Attributes:
        messages: with ``role`` and ``content``, and what else the template may read (``tool_calls``, ``name``).
        tools: as the template takes them; None where there are none.
        first_turn: number of the first message in its line, from 1.
    """

    messages: tuple[Message, ...]
    tools: Any = None
    first_turn: int = 1


def conversations_of(line: bytes) -> list[Conversation]:
    """What a line ``{"messages": [{"role": ..., "content": ...}, ...]}`` holds.

    A system message begins another conversation, as in Megatron's ``SFTDataset``.

    Raises:
        LineError: the line is no such object, or a turn is empty or of an unknown role, or nobody's turn is the assistant's.
    """
    record = _record(line)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise LineError("no list of messages", f"the keys are {', '.join(map(repr, record)) or 'none'}")
    for turn, message in enumerate(messages, 1):
        _check(message, turn)
    _check_unicode(record.get("tools"), "the tools")
    starts = [place for place, message in enumerate(messages) if place == 0 or message["role"] == SYSTEM]
    stops = [*starts[1:], len(messages)]
    found = [
        Conversation(tuple(messages[start:stop]), record.get("tools"), start + 1)
        for start, stop in zip(starts, stops, strict=True)
    ]
    for each in found:
        if all(message["role"] != ASSISTANT for message in each.messages):
            raise LineError(
                "no assistant turn", f"turns {each.first_turn} to {each.first_turn + len(each.messages) - 1}"
            )
    return found


def _record(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise LineError("not UTF-8", f"byte {error.start + 1} of the line") from error
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError("not JSON", str(error)) from error
    if not isinstance(record, dict):
        raise LineError("not a JSON object", f"a {type(record).__name__}")
    return record


def _check(message: Any, turn: int) -> None:
    if not isinstance(message, dict) or "role" not in message:
        raise LineError("a message without a role", f"turn {turn}")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise LineError("unknown role", f"{role!r} in turn {turn}, none of {', '.join(ROLES)}")
    if content is not None and not isinstance(content, str):
        raise LineError("content that is no text", f"a {type(content).__name__} in turn {turn}")
    if not _are_calls(message.get("tool_calls") or []):
        raise LineError("tool calls that are no list of objects", f"turn {turn}")
    if not (content or "").strip() and not (role == ASSISTANT and message.get("tool_calls")):
        raise LineError("empty turn", f"turn {turn} ({role})")
    try:
        (content or "").encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, escaped
        raise LineError("not Unicode", f"character {error.start + 1} of turn {turn}") from error
    _check_unicode({name: value for name, value in message.items() if name != "content"}, f"turn {turn}")


def _are_calls(calls: Any) -> bool:
    """Whether these are what templates read: objects, or functions within objects."""
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function") or call, dict) for call in calls
    )


def _check_unicode(values: Any, where: str) -> None:
    """Refuse half of a surrogate pair, escaped, in what a template may read."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise LineError("not Unicode", where) from error


def lines_between(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin at bytes ``start`` to ``stop`` of a file, each with where it begins."""
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            file.readline()  # the rest of a line that began before
        place = file.tell()
        while place < stop and (line := file.readline()):
            yield place, line
            place += len(line)
