"""Writing files so that a reader, or a process killed at any moment, never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from pathlib import Path

from megatron_balance.errors import BalanceError

_STALE_S = 60.0  # a write takes milliseconds; what is older belongs to a process that was killed


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path``, text as UTF-8: a temporary file beside it, fsync, rename.

    Raises:
        OSError: the folder does not exist or cannot be written, or ``path`` is a device, a pipe or a folder; it is then as it
            was.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():  # a rename would put a file in a device's place
        raise OSError(errno.EINVAL, "it is not a regular file")
    _remove_stale(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str | bytes, name: str) -> None:
    """The same for a file that a user named.

    Raises:
        BalanceError: ``name``, as "the plan file x.json", cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise BalanceError(f"{name} cannot be written ({error.strerror}): name another place") from error


def read_text(path: str | os.PathLike[str], name: str) -> str:
    """The text of a file that a user named; bytes that are not UTF-8 are replaced.

    Raises:
        BalanceError: ``name``, as "the plan file x.json", cannot be read, or is no regular file, which may have no end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BalanceError(f"{name} cannot be read ({error.strerror}): pass another") from error


def _remove_stale(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()
