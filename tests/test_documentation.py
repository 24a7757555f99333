"""What the documentation names is there: commands and their flags, files, links, variables, extras; and it names all of ours."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron_balance import cli
from megatron_balance.command_line import FLAGS
from megatron_balance.megatron.arguments import add_arguments

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_balance"
PAGES = ("README.md", "CONTRIBUTING.md", "patches/README.md", "scripts/launch/README.md")
OURS = re.compile(r"--(?:balanced|varlen|straggler)-[a-z0-9-]*[a-z0-9]")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
STARTERS = ("bash", "python", ".venv/bin/python", "sbatch", "pip", "megatron-balance", "torchrun")

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs the repository")


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Code within lines."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(page: str) -> Iterator[list[str]]:
    """Words of every command, in blocks and within lines, without what a reader has to fill in."""
    text = text_of(page)
    lines = [line for block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in (*lines, *spans(text)):
        first = next((word for word in line.split() if not ASSIGNMENT.match(word)), "")
        if first in STARTERS:
            line = re.sub(
                r"\[(--[^\]]*)\]", lambda found: found[1].replace("|", " "), line
            )  # flags that may be left out
            yield [word for word in shlex.split(re.sub(r"<[^>]*>", "", line)) if word != "..."]


def behind(words: list[str], *starters: str) -> list[str]:
    """The words behind a starter; none for another command."""
    at = next((place for place, word in enumerate(words) if not ASSIGNMENT.match(word)), 0)
    return words[at + 1 :] if words and words[at] in starters else []


def script_of(words: list[str]) -> str | None:
    """The script of ours that a command starts."""
    rest = behind(words, "bash", "python", ".venv/bin/python", "sbatch")
    return next((word for word in rest if word.endswith((".sh", ".py", ".sbatch")) and rest[0] != "-m"), None)


def named(words: list[str]) -> str:
    return " ".join(words)[:70]


COMMANDS = [words for page in PAGES for words in commands(page)]
CALLS = [words for words in COMMANDS if behind(words, "megatron-balance")]
SCRIPTS = [words for words in COMMANDS if script_of(words)]


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


@cache
def training_flags() -> set[str]:
    return option_names(add_arguments(argparse.ArgumentParser(add_help=False)))


@pytest.mark.parametrize("words", CALLS, ids=named)
def test_a_command_of_ours_is_one_that_the_command_line_takes(words):
    words = behind(words, "megatron-balance")
    if words[-1].startswith("--"):  # perhaps without its value
        of_command = cli._parser()._subparsers._group_actions[0].choices[words[0]]
        assert words.pop() in option_names(of_command)
    if len(words) == 1:  # named, not called
        words = [*words, "--help"]
    try:
        _, job = cli._parser().parse_known_args(words)
    except SystemExit as stopped:
        assert stopped.code == 0
        return
    assert {word for word in job if word.startswith("--")} <= {name for flag in FLAGS for name in flag.names}


@pytest.mark.parametrize("words", SCRIPTS, ids=named)
def test_a_script_is_there_and_knows_its_flags_and_variables(words):
    script = script_of(words)
    source = (ROOT / script).read_text(encoding="utf-8")
    if script.endswith("slurm.sbatch"):  # which starts the other
        source += (ROOT / "scripts/launch/torchrun.sh").read_text(encoding="utf-8")
    given = words[words.index(script) + 1 :]
    flags = {word.split("=")[0] for word in given if word.startswith("--")} - training_flags()
    variables = {word.split("=")[0] for word in words if ASSIGNMENT.match(word)}
    assert not {name for name in flags | variables if not re.search(rf"(?<![\w-]){name}(?![\w-])", source)}
    if script.startswith("scripts/launch/"):
        models = {path.stem for path in (ROOT / "scripts/launch/models").glob("*.sh")}
        assert {word for word in given if not word.startswith("--")} <= models | {"MODEL"}


def test_extras_that_are_installed_exist():
    asked = [words for words in COMMANDS if "pip" in words]
    extras = {
        extra
        for words in asked
        for found in re.findall(r"\[([a-z,]+)\]", " ".join(words))
        for extra in found.split(",")
    }
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)]
    declared = next(word.value for call in calls for word in call.keywords if word.arg == "extras_require")
    assert extras and extras <= {key.value for key in declared.keys}


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_ours_exist(page):
    commands = cli._parser()._subparsers._group_actions[0].choices
    known = training_flags().union(*map(option_names, commands.values()))
    assert set(OURS.findall(re.sub(r"`--[a-z-]*-\.\.\.`", "", text_of(page)))) <= known


def test_every_flag_of_training_is_in_the_readme():
    assert training_flags() <= set(re.findall(r"--[a-z0-9-]+", "\n".join(spans(text_of("README.md")))))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        linked = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert linked.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_and_variables_exist(page):
    code = "\n".join((*spans(text_of(page)), *blocks(text_of(page))))
    for path in re.findall(r"(?<![\w/.-])(?:scripts|tests|patches|megatron_balance)/[\w./*-]*", code):
        assert any(ROOT.glob(path.rstrip("/."))), f"{page} names {path}"
    for variable in re.findall(r"\bMEGATRON_[A-Z_]+", code):
        sources = (
            path for folder in ("megatron_balance", "scripts", "tests") for path in (ROOT / folder).rglob("*.[ps][yh]")
        )
        assert any(variable in path.read_text(encoding="utf-8") for path in sources), f"{page} names {variable}"


def test_every_room_is_in_the_table_and_has_the_files_named():
    """CONTRIBUTING's table of rooms: each row of existing folders or files, the files that it tells of in them, and all rooms."""
    table = text_of("CONTRIBUTING.md").partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+) \| .+ \|$", table, re.MULTILINE)
    listed = set()
    for rooms, job in rows:
        places = [PACKAGE / room for room in re.findall(r"`([^`]+)`", rooms)]
        assert all(place.exists() for place in places), rooms
        listed |= {place.relative_to(PACKAGE).parts[0] for place in places}
        for file in re.findall(r"`(\w+\.py)`", job):
            assert any((place / file).is_file() for place in places if place.is_dir()), f"{rooms} has no {file}"
    there = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there - {"__init__.py"} <= listed


def test_every_benchmark_is_in_the_table():
    table = text_of("CONTRIBUTING.md").partition("\n## Benchmarks\n")[2].partition("\n## ")[0]
    started = {
        path.name for path in (ROOT / "scripts/bench").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    assert started - {"recorder_observed.py"} == set(re.findall(r"^\| `(\w+\.py)`", table, re.MULTILINE))
