"""Events of a trace for ui.perfetto.dev or chrome://tracing.

Source: "Trace Event Format" of the Chromium project, which Perfetto reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FIRST_PROCESS = 1  # Perfetto takes 0 for an idle processor


def labels(what: str, process: int, thread: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    """Metadata events (``ph`` M): the name of a ``process`` or ``thread``, and its place among the others."""
    for kind, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield {"ph": "M", "pid": process, "tid": thread, "name": f"{what}_{kind}", "args": args}


def operation(
    process: int, thread: int, name: str, category: str, start_us: float, duration_us: float, **args: object
) -> dict[str, Any]:
    """A complete event (``ph`` X); those of a thread must nest. What else is known of it goes into ``args``."""
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }
