"""Fixtures shared by the tests that train."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from launch import TINY, Run, launch, trained

# How fast this machine is, and what else it does, is no test's business: an example may take as long as it does.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Nor what surrounds the tests: another job's ranks (as in a container that a cluster starts), colours that are forced on
# pipes, the width of a terminal. Names of models are folders here, for which nobody is asked.
for name in (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
):  # fmt: skip
    os.environ.pop(name, None)
os.environ |= {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What trains comes first, so that no process is left alone with it at the end (see `scripts/test.sh`)."""
    items.sort(key=lambda item: item.get_closest_marker("training") is None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Folder of a PP=1 checkpoint for the model flags given, written once a session.

    Weights drawn at another pipeline size differ (Megatron seeds each pipeline rank differently), so runs that are to be
    compared start from here.
    """

    @cache
    def write(model: str) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        once = "--save checkpoint --save-interval 1 --train-iters 1 --no-save-optim --no-save-rng".split()
        trained(launch(folder, [*TINY, *model.split(), *once]))
        return folder / "checkpoint"

    return write


@pytest.fixture(scope="session")
def from_checkpoint(checkpoint, tmp_path_factory) -> Callable[..., Run]:
    """Train 20 steps from the PP=1 checkpoint of the model, once for each set of flags: ``(model, flags, processes)``."""

    @cache
    def train(model: str, flags: str = "", processes: int = 1) -> Run:
        load = ["--load", str(checkpoint(model)), "--finetune", "--no-load-optim", "--no-load-rng"]
        folder = tmp_path_factory.mktemp("run")
        return trained(launch(folder, [*TINY, *model.split(), *load, *flags.split()], processes))

    return train


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """The Megatron-LM checkout that `MEGATRON_LM_PATH` names."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout")
    assert (Path(path) / "pretrain_gpt.py").is_file(), f"MEGATRON_LM_PATH={path} has no pretrain_gpt.py"
    return Path(path).resolve()
