#!/usr/bin/env bash
# Reproduce ranks held up by long documents, diagnose it, mend it, and diagnose it again. See --help.
set -euo pipefail
# shellcheck source=scripts/lib/reproduce.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/reproduce.sh"

story() {
    cat <<'HELP'
Real Megatron on two data-parallel ranks, one core each, from a clean seed, on the source text of Python's standard library:
a blend of two data sets, of functions and of long files in chapters.
  1. trains a GPT with long bins as stock, documents chopped and attention within each (--dataloader-inter-document-masking),
     with --straggler-trace
  2. `megatron-balance diagnose`: names the cause
  3. trains it again and with `--varlen-packing`, in turns, a step each, so that whatever else slows this machine slows both
  4. `megatron-balance diagnose --before --after`: which symptoms went, what was predicted, and what came
HELP
}

reproduce length "sequence lengths" "a minute instead of a minute and a half" "$@"
