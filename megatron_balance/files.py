"""Writing files so that a reader, or a process killed at any moment, never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_balance.errors import BalanceError

STALE_S = 3600.0  # a temporary file of another machine that was not written to for so long has no writer
_STALE_S = 60.0  # a write takes milliseconds; what is older belongs to a process that was killed
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)  # some network and parallel file systems


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path``, text as UTF-8: a temporary file beside it, fsync, rename.

    Raises:
        OSError: the folder does not exist or cannot be written, or ``path`` is a device, a pipe or a folder; it is then as it
            was.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():  # a rename would put a file in a device's place
        raise OSError(errno.EINVAL, "it is not a regular file")
    remove_left(path, _STALE_S)
    with writing_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing_atomically(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of ``path`` at the end, and is removed instead if anything fails."""
    temporary = path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_left(path: Path, stale_s: float, locked: bool = False) -> None:
    """Remove temporary files of processes that were killed while they wrote ``path``.

    Args:
        stale_s: seconds without a write after which a file is taken for such a one.
        locked: the caller holds a lock that keeps all others on this machine from writing ``path``, so that what this machine
            left goes at once.
    """
    for left in path.parent.glob(glob.escape(f".{path.name}.") + "*.tmp"):
        own = locked and left.name.startswith(f".{path.name}.{_host()}.")
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
            if own or time.time() - left.stat().st_mtime > stale_s:
                left.unlink()


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[bool]:
    """Be the only process on this machine, and on others where the file system can, that holds the lock ``path``.

    The kernel gives the lock up when its holder ends, however it ends. Gives whether there is one: where the file system has
    none, several processes may write the same bytes, each to its own temporary file.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
        else:
            yield True


def _host() -> str:
    """Name of this machine, as a part of a file's name."""
    return re.sub(r"[^\w-]", "-", socket.gethostname())[:64]


def write_text(path: str | os.PathLike[str], text: str | bytes, name: str) -> None:
    """`write_atomically` for a file that a user named.

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
    with readable(name):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return Path(path).read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def readable(name: str | Path) -> Iterator[None]:
    """Make a `BalanceError` of a file, named so in it, that cannot be read."""
    try:
        yield
    except OSError as error:
        raise BalanceError(f"{name} cannot be read ({error.strerror or error}): pass another") from error


def write_standard_output(text: str) -> None:
    """Write to standard output, at once: a disk that is full shows while it can still be said.

    Raises:
        BalanceError: it cannot be written.
    """
    if sys.stdout is None:
        raise BalanceError("standard output cannot be written (it is closed)")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old locale lacks the blocks of a bar
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        raise BalanceError(f"standard output cannot be written ({error.strerror})") from error


def check_place(flag: str, path: Path, begins: bytes) -> None:
    """Refuse a place where nothing can be written, or where something stands that is none of ours.

    Args:
        flag: as the user typed it.
        path: given with it.
        begins: how all files begin that it writes.

    Raises:
        BalanceError: says what is there.
    """
    if not (folder := path.absolute().parent).is_dir():
        raise BalanceError(f"{flag} {path}: there is no folder {folder}")
    try:
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(len(begins)) != begins:
                    raise BalanceError(f"{flag} {path} is there and was not written by this flag: name another file")
        elif path.exists() and not path.is_file():
            raise BalanceError(f"{flag} {path} is there and no regular file: name another file")
    except OSError as error:
        raise BalanceError(f"{flag} {path} cannot be written ({error.strerror}): name another file") from error
