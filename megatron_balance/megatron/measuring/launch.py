"""Starting the measuring process, and keeping what it found."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_balance.costs.table import CostTable, load_costs
from megatron_balance.errors import BalanceError
from megatron_balance.files import write_atomically
from megatron_balance.reading import Scalar

_MODULE = "megatron_balance.megatron.measuring"
_TIMEOUT_S = 300.0
_LOG_BYTES = 1_000_000  # at the end of the output, kept when it fails
_SCRATCH = "megatron-balance-measuring-"
# Flags that act before arguments can be changed: they would speak to the services that watch over the real job.
_TOO_EARLY = ("--enable-ft-package", "--inprocess-restart")
_TELEMETRY = ("MEGATRON_OTEL", "NEMO_LENS")


class MeasurementFailed(Exception):
    """Why there are no measured costs; the message is for the user."""


def measure(script: str | None, arguments: list[str], device: str, world_size: int = 1) -> CostTable:
    """Measure the costs of a job in a process of its own, which ends with this one.

    Args:
        script: the job's training script; None for our own.
        arguments: its command line.
        device: ``auto``, ``cpu`` or ``cuda``; which GPU says `LOCAL_RANK`.
        world_size: ranks of one pipeline stage, whose shapes the process takes on; 1 for as many as the flags need.

    Raises:
        MeasurementFailed: no process could be started, or it ended without a result.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_TELEMETRY)}
    environment |= {"RANK": "0", "WORLD_SIZE": str(world_size)}
    flags = [flag for flag in arguments if flag not in _TOO_EARLY]
    with _scratch() as folder:
        file, log = folder / "costs.json", folder / "output.log"
        target = [str(file), "--device", device, *([script] if script else []), *flags]
        status = _run([sys.executable, "-m", _MODULE, str(os.getpid()), *target], environment, log)
        if status != 0 or not file.exists():
            raise MeasurementFailed(_account(log, status))
        try:
            return load_costs(file)
        except BalanceError as error:
            raise MeasurementFailed(str(error)) from error


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix=_SCRATCH, ignore_cleanup_errors=True)
    except OSError as error:
        raise MeasurementFailed(f"no temporary folder can be made ({error.strerror})") from error
    with folder as name:
        for left in Path(name).parent.glob(f"{_SCRATCH}*"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > 10 * _TIMEOUT_S:
                    shutil.rmtree(left)
        yield Path(name)


def _run(command: list[str], environment: Mapping[str, str], log: Path) -> int:
    """The command's exit status; it and what it started are ended when it takes too long."""
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to be ended as one
            )
    except OSError as error:
        raise MeasurementFailed(f"no second process can be started ({error.strerror})") from error
    try:
        return process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"it took longer than {_TIMEOUT_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or some systems' word for that
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _account(log: Path, status: int) -> str:
    """What is known of a failure, and where the output is kept."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        output = file.read().decode(errors="replace")
    kept = cache_folder() / "measuring-failed.log"
    try:
        write_atomically(kept, output)
    except OSError:
        kept = None
    where = f" (its output: {kept})" if kept else ""
    return f"the measuring process {_reason(output, status)}{where}"


def _reason(output: str, status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}{' (out of memory?)' if status == -signal.SIGKILL else ''}"
    if status == 0:
        return "ended without training a step"
    lines = [
        re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in output.splitlines()
    ]  # torch's mark on a traceback
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b|megatron-balance: error", line)]
    return f"ended with status {status}" + (f": {errors[-1][:300]}" if errors else "")


# --- cache ------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """What `MEGATRON_BALANCE_CACHE` names, or a folder in the user's cache; made where possible."""
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if users.startswith("~"):  # a user without a home
        users = tempfile.gettempdir()
    folder = Path(os.environ.get("MEGATRON_BALANCE_CACHE") or Path(users) / "megatron_balance")
    with contextlib.suppress(OSError):  # whoever writes there says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_file(key: Mapping[str, Any]) -> Path:
    """Where the costs of ``key``, which JSON can hold, are kept."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"costs-{digest[:24]}.json"


def cached(file: Path, shapes: Mapping[str, Scalar]) -> CostTable | None:
    """The costs kept in ``file``; None where there are none, or not what they should be."""
    try:
        table = load_costs(file)
        table.check_fits(shapes, str(file))
    except BalanceError:
        return None
    return table
