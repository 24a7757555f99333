"""Writing files so that a reader, or a process killed at any moment, never meets half of one."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STALE_S = 60.0  # a write takes milliseconds; what is older belongs to a process that was killed


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path``: a temporary file beside it, fsync, rename.

    Raises:
        OSError: the folder does not exist or cannot be written; ``path`` is then as it was.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    _remove_stale(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_stale(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            left.unlink(missing_ok=True)
