#!/usr/bin/env bash
# Train with the pretrain_gpt.py of several Megatron-LM checkouts, with and without our flags, and compare. See --help.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: bash scripts/test_matrix.sh [--out FOLDER] CHECKOUT...

For each Megatron-LM checkout trains a tiny GPT on the CPU with its own, unmodified pretrain_gpt.py: stock on two pipeline
stages, balanced, packed (fixed and variable shapes), both, resumed. Prints a markdown table of the largest relative
difference of a loss from those of one process (a resumed run: from those of the run that was not interrupted); progress goes
to the standard error. About a minute a checkout on two cores, once the packages are installed.

  --out FOLDER  keep outputs and results there, and run only what has no result there (checkouts go by the names of their folders)
  -h, --help    this text

Exit status: 0 when all that stock Megatron runs is run with our flags and agrees; 1 otherwise; 2 for a wrong argument.

Environment:
  MEGATRON_BALANCE_PYTHON         the Python to make .venv with, instead of searching
  MEGATRON_BALANCE_MATRIX_PYTHON  a Python that has all packages, instead of .venv: its megatron-core gives the checkouts the
                                  compiled dataset helpers, they need nothing else of it
HELP
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage && exit ;; esac
done
[ $# != 0 ] || { usage >&2 && exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${MEGATRON_BALANCE_MATRIX_PYTHON:-}
if [ -z "$python" ]; then
    caller=$PWD
    cd "$root"
    # shellcheck source=scripts/lib/python.sh
    source scripts/lib/python.sh
    ensure_venv .venv 3.12
    install_project .venv matrix
    python=$root/.venv/bin/python
    cd "$caller"
fi

export OMP_NUM_THREADS=1
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m matrix "$@"
