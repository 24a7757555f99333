# shellcheck shell=bash
# Shell functions shared by the scripts of this folder: find a Python, make a virtual environment, install the project.
# Source it from bash; it runs nothing by itself.

# say TEXT...: a line for the person who watches.
say() { printf '%s\n' "$*" >&2; }

# python_fits PYTHON MIN [BELOW]: whether PYTHON runs (a pyenv shim may not), is at least MIN ("3.12") and older than
# BELOW, and can make virtual environments (Debian moves that to a package of its own).
python_fits() {
    "$1" - "$2" "${3:-99}" >/dev/null 2>&1 <<'PYTHON'
import ensurepip, sys, venv
minimum, below = (tuple(map(int, version.split("."))) for version in sys.argv[1:])
sys.exit(not minimum <= sys.version_info[:2] < below)
PYTHON
}

# python_candidates MIN: commands and paths that may be a Python, the oldest minor version first: packages with compiled
# parts reach a new Python last.
python_candidates() {
    local minor pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
    for minor in $(seq "${1#*.}" 20); do
        type -ap "python3.$minor" || true
        printf '%s\n' "$pyenv_root/versions/3.$minor".*/bin/python
        # Only what is already on this machine: downloading a Python is left to the user.
        uv python find --no-python-downloads --system "3.$minor" 2>/dev/null || true
    done
    type -ap python3 python || true
}

# find_python MIN [BELOW]: print the path of a Python that fits, or say what to do and fail.
# MEGATRON_BALANCE_PYTHON, when set, is the only candidate.
find_python() {
    local candidate wanted="Python $1 or newer${2:+, older than $2}"
    if [ -n "${MEGATRON_BALANCE_PYTHON:-}" ]; then
        python_fits "$MEGATRON_BALANCE_PYTHON" "$@" && { printf '%s\n' "$MEGATRON_BALANCE_PYTHON"; return; }
        say "MEGATRON_BALANCE_PYTHON=$MEGATRON_BALANCE_PYTHON is not $wanted with the modules venv and ensurepip."
        return 1
    fi
    while IFS= read -r candidate; do
        python_fits "$candidate" "$@" && { printf '%s\n' "$candidate"; return; }
    done < <(python_candidates "$1")
    say "Found no $wanted with the modules venv and ensurepip, neither on PATH nor among the versions of pyenv and uv."
    say "Install one (for example: apt install python$1 python$1-venv, or: uv python install $1) and run this again;"
    say "or name one: MEGATRON_BALANCE_PYTHON=/path/to/python $0"
    return 1
}

# ensure_venv FOLDER MIN [BELOW]: make FOLDER a virtual environment of such a Python unless it is one.
ensure_venv() {
    local folder=$1 python
    shift
    if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        python_fits "$folder/bin/python" "$@" && return
        say "$folder holds $("$folder/bin/python" -V), but Python $1 or newer${2:+, older than $2,} is needed: remove that folder."
        return 1
    fi
    python=$(find_python "$@") || return
    say "Making $folder with $("$python" -V) ($python)"
    "$python" -m venv --clear "$folder"  # clear: an interrupted try may have left half of one
}

# install_project FOLDER EXTRAS [REQUIREMENT...]: install the project of the current folder, editable, with EXTRAS
# ("quickstart" or "quickstart,test") and what else is named, into the environment FOLDER; nothing when that was done
# for the same setup.py.
install_project() {
    local folder=$1 extras=$2 stamp wanted
    shift 2
    stamp="$folder/.installed-${extras//,/-}"
    wanted=$({ cat setup.py pyproject.toml; printf '%s\n' "$PWD" "$extras" "$@"; } | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    say "Installing into $folder (the first time downloads PyTorch and Megatron Core; this may take minutes)"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]" "$@" || {
        say "pip could not install the project into $folder (see above). Run this again once that is solved."
        return 1
    }
    printf '%s\n' "$wanted" >"$stamp"
}

# run_module ROOT MODULE ARGUMENTS...: `python -m MODULE` of ROOT's scripts/, in the caller's folder, with the environment ROOT/.venv,
# which is made and filled before. Never returns.
run_module() {
    local root=$1 caller=$PWD
    shift
    cd "$root" || return
    # megatron-core carries megatron.training, which these need, only for Python 3.12 and newer.
    ensure_venv .venv 3.12
    install_project .venv quickstart,trace
    export PYTHONPATH="$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
    cd "$caller" || return
    # `exec` makes Ctrl-C reach Python alone, which then stops what it has started.
    exec "$root/.venv/bin/python" -m "$@"
}
