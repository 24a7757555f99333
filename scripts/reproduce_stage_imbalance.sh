#!/usr/bin/env bash
# Reproduce a pipeline held up by its last stage, diagnose it, mend it, and diagnose it again. See --help.
set -euo pipefail
# shellcheck source=scripts/lib/reproduce.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/reproduce.sh"

story() {
    cat <<'HELP'
Real Megatron on two pipeline stages, from a clean seed, on the source text of Python's standard library:
  1. trains a GPT with a large vocabulary as stock, layers split uniformly, with --straggler-trace
  2. `megatron-balance diagnose`: names the cause, and what the head costs
  3. trains it again and with `--balanced-pipeline`, which measures and plans, in turns, a step each, so that
     whatever else slows this machine slows both
  4. `megatron-balance diagnose --before --after`: which symptoms went, what was predicted, and what came
HELP
}

reproduce stage "the stage split" "2 minutes instead of 3" "$@"
