"""Run a Megatron training script with our hooks: the target of `torchrun -m megatron_balance.run`."""

from __future__ import annotations

import os
import platform
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from megatron_balance.errors import BalanceError
from megatron_balance.reporting import global_rank, say, stops_on_error

USAGE = """\
usage: torchrun [...] -m megatron_balance.run [--device auto|cpu|cuda] [SCRIPT] [Megatron's flags] [our flags]

Runs SCRIPT, an unmodified pretrain_gpt.py of a Megatron-LM checkout, with the megatron-balance flags added to its command
line; without SCRIPT, the package's own pretrain_gpt on the installed megatron-core (0.18 or newer).

  --device auto|cpu|cuda  auto (default) trains on the CPU (gloo) only where no GPU can be used

`--help` after SCRIPT, or alone, lists all flags; ours stand under "megatron-balance".
"""

_OWN_SCRIPT = "megatron_balance.megatron.pretrain_gpt"


def main(argv: list[str] | None = None, ready: Callable[[], None] | None = None) -> None:
    """Prepare the process and run the script as ``__main__``.

    Args:
        argv: what follows `megatron_balance.run` on the command line; default: this process's.
        ready: called between the two, when Megatron can be imported, to add hooks to one's own run.
    """
    script = prepare(sys.argv[1:] if argv is None else argv)
    if ready is not None:
        ready()
    if script is None:
        runpy.run_module(_OWN_SCRIPT, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


@stops_on_error
def prepare(argv: list[str]) -> str | None:
    """Choose the device, set `sys.argv` and `sys.path` as the script expects them, and install the hooks.

    Returns:
        The script's path, None for our own.

    Raises:
        SystemExit: the command line is not usable (status 2).
    """
    device, script, rest = _split(argv)
    if script is None and rest[:1] in (["-h"], ["--help"]):
        say(USAGE)
    if global_rank() != 0:  # as pretrain_gpt.py does, which imports Megatron only after us
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category)
    sys.argv = [script or _OWN_SCRIPT, *rest]
    if script is not None:
        sys.path.insert(0, str(Path(script).resolve().parent))
    _choose_device(device)
    from megatron_balance import cpu, enable

    _check_importable(script)
    if cpu.is_installed():
        cpu.prepare_megatron()

    enable()
    return script


def _split(argv: list[str]) -> tuple[str, str | None, list[str]]:
    device, rest = "auto", list(argv)
    if rest and rest[0].split("=")[0] == "--device":
        _, separator, value = rest.pop(0).partition("=")
        if not separator:
            value = rest.pop(0) if rest else "(nothing)"
        if value not in ("auto", "cpu", "cuda"):
            raise BalanceError(f"--device {value}: must be auto, cpu or cuda")
        device = value
    if not rest or rest[0].startswith("-"):
        if any(argument.split("=")[0] == "--device" for argument in rest):
            raise BalanceError("--device is a flag of this launcher, not of Megatron: put it before all others")
        return device, None, rest
    script = rest.pop(0)
    if not Path(script).is_file():
        raise BalanceError(f"no training script {script}: give the path of a pretrain_gpt.py, or none to use our own")
    return device, script, rest


def _choose_device(device: str) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if torch.cuda.is_available():
        return
    if device == "cuda":
        raise BalanceError(f"--device cuda, but torch {torch.__version__} finds no usable GPU")
    if device == "auto" and int(os.environ.get("WORLD_SIZE", 1)) > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        several = (
            "has several machines"
            if "LOCAL_WORLD_SIZE" in os.environ
            else "may have others (LOCAL_WORLD_SIZE is not set)"
        )
        raise BalanceError(
            f"no usable GPU on {platform.node()}, but this job {several}: mend the driver, or give --device cpu to train on"
            " CPUs everywhere"
        )
    from megatron_balance import cpu

    cpu.install()
    reason = "asked for" if device == "cpu" else "no GPU here"
    say(f"megatron-balance: training on the CPU with gloo ({reason})")


def _check_importable(script: str | None) -> None:
    try:
        import megatron.training.arguments  # noqa: F401
    except ImportError as error:
        where = f"the checkout of {script}" if script else "the installed megatron-core"
        remedy = (
            "Install what is missing into this environment."
            if script
            else "megatron-core 0.18 or newer carries megatron.training (Python 3.12 or newer); or give the path of a"
            " checkout's pretrain_gpt.py."
        )
        raise BalanceError(f"megatron.training of {where} cannot be imported: {error}. {remedy}") from error


if __name__ == "__main__":
    main()
