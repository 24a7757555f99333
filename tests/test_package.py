"""The wheel and the source archive hold what they need, and the public API is typed."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import tarfile
import typing
import zipfile
from pathlib import Path

import pytest

import megatron_balance

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist", "__pycache__", "*-out")
BUILDER = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[set[str], set[str]]:
    """Names in the wheel and in the source archive, without the latter's folder, built of a copy of the repository."""
    pytest.importorskip("setuptools")
    if not (ROOT / "setup.py").is_file():
        pytest.skip("needs the repository")
    copy, made = tmp_path_factory.mktemp("copy") / "tree", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for kind in ("build_wheel", "build_sdist"):
        done = subprocess.run(
            [sys.executable, "-c", BUILDER, kind, str(made)], cwd=copy, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel, tarfile.open(next(made.glob("*.tar.gz"))) as source:
        return set(wheel.namelist()), {name.partition("/")[2] for name in source.getnames()}


def files(folder: str) -> set[str]:
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_wheel_holds_the_package_and_nothing_else(archives):
    wheel, _ = archives
    assert {name for name in wheel if ".dist-info/" not in name} == files("megatron_balance")
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_source_archive_holds_what_tests_and_readers_need(archives):
    _, source = archives
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "setup.py", "pyproject.toml"}
    for folder in ("megatron_balance", "tests", "scripts", "patches", ".github"):  # the last has the pictures
        needed |= files(folder)
    assert needed <= source, sorted(needed - source)


def test_the_public_api_is_typed():
    assert (Path(megatron_balance.__file__).parent / "py.typed").is_file()
    public = [getattr(megatron_balance, name) for name in megatron_balance.__all__]
    for function in filter(callable, public):
        hints = typing.get_type_hints(function)
        assert hints.keys() == {*inspect.signature(function).parameters, "return"}, function
