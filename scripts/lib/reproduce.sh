# shellcheck shell=bash
# The shell function of the scripts that reproduce a failure. Source it from bash; it runs nothing by itself.

# reproduce FAILURE CAUSE QUICK ARGUMENTS...: tell what the script does, if ARGUMENTS ask for it, or do it. FAILURE and CAUSE as the
# script and the diagnosis name them, QUICK how long --quick takes; the caller's function `story` prints what is trained.
reproduce() {
    local failure=$1 cause=$2 quick=$3 argument root
    shift 3
    for argument in "$@"; do
        case "$argument" in -h | --help) reproduce_usage && exit ;; esac
    done
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    # shellcheck source=scripts/lib/python.sh
    source "$root/scripts/lib/python.sh"
    run_module "$root" reproduce "$failure" "$@"
}

# reproduce_usage: of the script whose names `reproduce` was given.
reproduce_usage() {
    cat <<HELP
usage: bash scripts/reproduce_${failure}_imbalance.sh [--quick] [--out FOLDER]

$(story)

It checks, and says what is not so, that the diagnosis names $cause as the worst cause of the stock job; that every line
of its checklist that said yes before says no after; and that the predicted ratio of step times is within 10 % of the measured
one. On a busy machine the last may fail.

  --quick       fewer steps: $quick (on two CPU cores, once the packages are installed)
  --out FOLDER  where results go (default: reproduce-out/$failure in the repository)
  -h, --help    this text

What it leaves in the folder:
  alone/, turns/  logs, and the traces of every job, for \`megatron-balance diagnose\`
  summary.json    verdicts, symptoms, predicted and measured gain

Exit status: 0 when all of that is so; 1 when it is not, or a launch failed; 2 for a wrong argument.

Environment: as for scripts/quickstart.sh
HELP
}
