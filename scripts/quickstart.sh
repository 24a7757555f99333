#!/usr/bin/env bash
# Train a small GPT as stock Megatron does and with our flags, and compare them. See --help.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: bash scripts/quickstart.sh [--quick] [--out FOLDER]

Trains a small GPT with a large vocabulary on two pipeline stages with real Megatron-LM: once with Megatron's uniform
split of the layers, once with `--balanced-pipeline`, several times in turn, all from the same weights and on the same
data; then another on documents of very different lengths, chopped as Megatron does and with `--varlen-packing`, in turns.
Needs nothing but Python 3.12 or newer and two CPU cores; uses two GPUs where there are some.

  --quick       fewer steps: two to three minutes instead of four (on two CPU cores, once the packages are installed)
  --out FOLDER  where results go (default: quickstart-out in the repository)
  -h, --help    this text

What it does:
  1. finds a Python, makes .venv, installs the project there (skipped when done before)
  2. builds a corpus from Python's own standard library: a byte-level BPE tokenizer, a Megatron indexed dataset
     (kept and used again)
  3. writes a starting checkpoint with one unsplit run
  4. starts training with the uniform split on two processes, which wait for their turn
  5. starts training with --balanced-pipeline on two more, which measures what layers and head cost here, plans, and
     predicts the step times of both splits; then both train in turns, a step each
  6. compares step times, with each other and with the prediction, and losses
  7. trains on a blend of functions and of long source files in chapters, on two data-parallel ranks, chopped and packed in
     turns, a step each, and compares the tokens learned a second
  8. diagnoses what all four jobs recorded (--straggler-trace): the cause that it names before, what is left of the symptoms
     after, the gain that it predicts and the one that came

What it leaves in the folder:
  summary.json   splits, predicted and measured step times and speed-up, largest relative loss difference, every round; the same
                 of packing; what the diagnosis says
  timelines.png  both pipelines during one typical step
  plan.json      the balanced plan, as --balanced-pipeline-plan wrote it
  costs/         the measured costs that it stands on
  logs/          the command and full output of every launch
  traces/        what both jobs recorded, for `megatron-balance diagnose`
  packed/        the same of step 7, and what each rank was fed

Exit status: 0 when it ran and the losses agree; 1 when a launch failed or the losses differ; 2 for a wrong argument.

Environment:
  MEGATRON_BALANCE_PYTHON  the Python to make .venv with, instead of searching
  PIP_INDEX_URL, ...       pip's own variables hold as usual. On Linux, PyPI's PyTorch is the large CUDA build; where
                           there is no GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu may save the download
HELP
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage && exit ;; esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/python.sh"
run_module "$root" quickstart "$@"
