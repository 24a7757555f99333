#!/usr/bin/env bash
# Set up and run all tests: bash scripts/test.sh [pytest's arguments]. See --help.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: bash scripts/test.sh [PYTEST ARGUMENTS]

Makes two virtual environments (each skipped when done before), checks the code with ruff, which ends it where something is
found, and runs the tests in them:

  .venv         Python 3.12 or newer, megatron-core 0.19: the whole suite, which trains the real Megatron on the CPU
  .venv-older   Python 3.10 or 3.11, megatron-core 0.16.1: all tests that do not need megatron.training, which wheels for
                these versions do not carry; left out, with a notice, where there is no such Python (an error with CI=true)

Arguments are passed on to pytest in both.

Environment:
  MEGATRON_LM_PATH       a Megatron-LM checkout: the suite then also trains with its own pretrain_gpt.py
  MEGATRON_BALANCE_DATA  folder of public traces (default ../shared/data); tests that read them are skipped without it
HELP
}

case "${1:-}" in -h | --help) usage && exit ;; esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/python.sh

ensure_venv .venv 3.12
install_project .venv quickstart,test,trace "megatron-core==0.19.*"
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
# A training run leaves a core idle for most of its start. A file's tests share checkpoints and runs.
at_once=(--numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder)
.venv/bin/python -m pytest "${at_once[@]}" "$@"

unset MEGATRON_BALANCE_PYTHON  # if set, it names the newer one
if ! older=$(find_python 3.11 3.12 || find_python 3.10 3.11); then
    [ "${CI:-}" != true ] || exit 1
    say "Left out: the tests with megatron-core 0.16.1 on Python 3.10 or 3.11, as none was found (see above)."
    exit
fi
MEGATRON_BALANCE_PYTHON=$older ensure_venv .venv-older 3.10 3.12
install_project .venv-older test "megatron-core==0.16.1"
.venv-older/bin/python -m pytest "${at_once[@]}" -m "not training" "$@"
