"""Patches for Megatron-LM trees without the launcher: applied whole or not at all, and taken out again without a trace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import TINY

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "patches"
KINDS = {path.parent.name: path for path in PATCHES.glob("*/*.patch")}
# No settings of the user's, as to sign commits or run hooks, and no repository that tests are run from.
WITHOUT_GITS = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


def apply(tree: Path, *option: str) -> tuple[int, str]:
    command = ["bash", str(ROOT / "scripts/apply_patches.sh"), *option, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def fitting_tree(folder: Path, kind: str) -> Path:
    """A tree with what the patch of a kind looks for and nothing else: its symbols, and the lines around each change."""
    changed = re.split(r"^--- a/.*\n\+\+\+ b/(.*)\n", KINDS[kind].read_text(), flags=re.MULTILINE)[1:]
    parts: dict[str, list[str]] = {"megatron/core/transformer/__init__.py": [], "megatron/training/arguments.py": []}
    for line in (PATCHES / kind / "symbols.txt").read_text().splitlines():
        if not line.startswith("#"):
            file, symbol = line.split()
            parts.setdefault(file, []).append(f"def {symbol}(): ...\n")
    for file, hunks in zip(changed[::2], changed[1::2], strict=True):
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            old = [line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " -"]
            parts.setdefault(file, []).append("# elsewhere\n" + "".join(old) + "# elsewhere\n")
    for file, text in parts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("".join(text))
    return folder


@pytest.fixture(params=sorted(KINDS))
def kind(request) -> str:
    return request.param


@pytest.fixture
def tree(kind, tmp_path) -> Path:
    return fitting_tree(tmp_path / "a fork", kind)


@pytest.mark.parametrize("repository", [False, True])
def test_applied_once_and_taken_out_without_a_trace(tree, kind, repository):
    if repository:  # the user's own, with a change that is not committed, under a setting that rewrites line ends
        git = ["git", "-C", str(tree), "-c", "user.name=n", "-c", "user.email=n@example.org"]
        git += ["-c", "maintenance.auto=false", "-c", "gc.auto=0"]  # nothing goes on behind our back
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "fork"], ["config", "core.autocrlf", "true"]):
            subprocess.run([*git, *arguments], check=True, env=WITHOUT_GITS)
        for file in tree.glob("megatron/training/*.py"):
            file.write_text("# mine\n" * 7 + file.read_text())
    before = contents(tree)
    status, said = apply(tree, "--check")
    assert status == 0 and f"{kind}/" in said and contents(tree) == before
    assert apply(tree)[0] == 0
    patched = contents(tree)
    assert {name for name in before if before[name] != patched[name]} == {
        name for name in re.findall(r"^\+\+\+ b/(.*)$", KINDS[kind].read_text(), flags=re.MULTILINE)
    }
    status, said = apply(tree)
    assert status == 0 and "already" in said and contents(tree) == patched
    assert apply(tree, "--reverse")[0] == 0 and contents(tree) == before
    status, said = apply(tree, "--reverse")
    assert status == 0 and "nothing to take out" in said and contents(tree) == before


def test_every_renamed_symbol_is_named_and_refused_whole(tree, kind):
    lines = (PATCHES / kind / "symbols.txt").read_text().splitlines()
    for file, symbol in (line.split() for line in lines if not line.startswith("#")):
        original = (tree / file).read_text()
        (tree / file).write_text(original.replace(f"def {symbol}(", f"def renamed_{symbol}("))
        before = contents(tree)
        status, said = apply(tree)
        assert status == 1 and f"{symbol} ({file})" in said and contents(tree) == before
        (tree / file).write_text(original)
    assert apply(tree)[0] == 0


def test_a_place_that_differs_is_shown_and_nothing_touched(tree, kind):
    file, line = re.search(r"^\+\+\+ b/(.*)\n@@.*\n(?:\+.*\n)* *(.*)$", KINDS[kind].read_text(), re.MULTILINE).groups()
    (tree / file).write_text((tree / file).read_text().replace(line, f"{line}  # changed"))
    before = contents(tree)
    status, said = apply(tree)
    assert status == 1 and file in said and line in said and contents(tree) == before


def test_enabled_after_a_megatron_import_would_be_too_late(tmp_path):
    tree = fitting_tree(tmp_path, "enable")
    script = tree / "pretrain_gpt.py"
    script.write_text("from megatron.core import mpu\n" + script.read_text())
    before = contents(tree)
    status, said = apply(tree)
    assert status == 1 and "before the first import of Megatron" in said and contents(tree) == before


def test_what_cannot_be_written_leaves_all_files_alone(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("nothing is write-protected for root")
    tree = fitting_tree(tmp_path, "layer-assignment")
    (tree / "megatron/training/arguments.py").chmod(0o444)
    before = contents(tree)
    status, said = apply(tree)
    assert status == 1 and "arguments.py" in said and contents(tree) == before


@pytest.mark.parametrize("wrong", [[], ["--wrong"], ["no/such/folder"]])
def test_wrong_arguments(wrong):
    done = subprocess.run(["bash", str(ROOT / "scripts/apply_patches.sh"), *wrong], capture_output=True, text=True)
    assert done.returncode == 2 and "usage:" in done.stderr


def test_a_folder_without_megatron_is_refused(tmp_path):
    status, said = apply(tmp_path)
    assert status == 1 and "megatron/training/arguments.py" in said


# --- a real tree: the checkout that MEGATRON_LM_PATH names


@pytest.mark.training
def test_patched_checkout_trains_as_stock_and_is_restored(megatron_lm, tmp_path):
    tree = tmp_path / "fork"
    tree.mkdir()
    for path in [*megatron_lm.glob("*.py"), *megatron_lm.glob("*.toml"), megatron_lm / "megatron"]:
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, tree / path.name)
    stock, built = train(tree, 1, "")
    assert built == ["rank 0 built [[1, 2, 3, 4, 5, 6]]"]
    before = sources(tree)
    assert apply(tree)[0] == 0
    with_layouts = (tree / "megatron/core/transformer/pipeline_parallel_layer_layout.py").exists()
    ours = "--balanced-pipeline --balanced-pipeline-costs analytic --balanced-pipeline-head-weight 2"
    patched, built = train(tree, 2, ours if with_layouts else "--pipeline-layers 4 2")
    assert built == ["rank 0 built [[1, 2, 3, 4]]", "rank 1 built [[5, 6]]"]
    assert len(stock) == 5 and patched == pytest.approx(stock, rel=1e-6)
    if not with_layouts:  # stages without layers, first, in between and last of their rank
        virtual = "--num-virtual-stages-per-pipeline-rank 2 --pipeline-layers 0 4 0 2"
        interleaved, built = train(tree, 2, virtual)
        assert built == ["rank 0 built [[], []]", "rank 1 built [[1, 2, 3, 4], [5, 6]]"]
        assert interleaved == pytest.approx(stock, rel=1e-6)
    assert apply(tree, "--reverse")[0] == 0
    assert sources(tree) == before


def sources(tree: Path) -> dict[str, bytes]:
    return {name: text for name, text in contents(tree).items() if name.endswith((".py", ".toml"))}


def train(tree: Path, processes: int, flags: str) -> tuple[list[float], list[str]]:
    """Losses as the log has them, and the layers that each rank built."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = (
        "--num-layers 6 --train-iters 5 --vocab-size 9000 --untie-embeddings-and-output-weights"
        f" --no-gradient-accumulation-fusion --no-persist-layer-norm --pipeline-model-parallel-size {processes}"
    )
    driver = [str(ROOT / "tests/patched_run.py"), str(tree / "pretrain_gpt.py")]
    command = [*launcher, *driver, *TINY, *settings.split(), *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)], sorted(
        re.findall(r"^rank \d built .*$", output, flags=re.MULTILINE)
    )
