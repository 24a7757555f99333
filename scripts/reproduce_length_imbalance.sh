#!/usr/bin/env bash
# Reproduce ranks held up by long documents, diagnose it, mend it, and diagnose it again. See --help.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: bash scripts/reproduce_length_imbalance.sh [--quick] [--out FOLDER]

Real Megatron on two data-parallel ranks, one core each, from a clean seed, on the source text of Python's standard library:
a blend of two data sets, of functions and of long files in chapters.
  1. trains a GPT with long bins as stock, documents chopped and attention within each (--dataloader-inter-document-masking),
     with --straggler-trace
  2. `megatron-balance diagnose`: names the cause
  3. trains it again and with `--varlen-packing`, in turns, a step each, so that whatever else slows this machine slows both
  4. `megatron-balance diagnose --before --after`: which symptoms went, what was predicted, and what came

It checks, and says what is not so, that the diagnosis names sequence lengths as the worst cause of the stock job; that every line
of its checklist that said yes before says no after; and that the predicted ratio of step times is within 10 % of the measured
one. On a busy machine the last may fail.

  --quick       fewer steps: a minute instead of a minute and a half (on two CPU cores, once the packages are installed)
  --out FOLDER  where results go (default: reproduce-out/length in the repository)
  -h, --help    this text

What it leaves in the folder:
  alone/, turns/  logs, and the traces of every job, for `megatron-balance diagnose`
  summary.json    verdicts, symptoms, predicted and measured gain

Exit status: 0 when all of that is so; 1 when it is not, or a launch failed; 2 for a wrong argument.

Environment: as for scripts/quickstart.sh
HELP
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage && exit ;; esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/python.sh"
run_module "$root" reproduce length "$@"
