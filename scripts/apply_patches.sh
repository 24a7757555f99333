#!/usr/bin/env bash
# Put the patch of patches/ that fits into a Megatron-LM tree, or take it out again. See --help.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: bash scripts/apply_patches.sh [--check|--reverse] DIR

For Megatron-LM trees (forks, containers) whose jobs are not started by `-m megatron_balance.run`. Of the kinds of patch,
the tree in DIR gets the one that its features ask for, whatever version it calls itself:

  enable            trees with --pipeline-model-parallel-layout: two lines in pretrain_gpt.py that call
                    megatron_balance.enable(), so that our flags work without the launcher
  layer-assignment  trees without: the flag --pipeline-layers N N ..., the number of layers of each pipeline stage;
                    `megatron-balance plan --format layers` prints it. Such a tree then needs none of our code

  --check    say what would be done, change nothing
  --reverse  take the patch out again
  -h, --help this text

All or nothing: unless every symbol that a patch stands on is there and every part of it fits, no file is touched. What is
done already is not done twice. DIR need not be a git repository, and its index is left alone.

Exit status: 0 done, or nothing to do; 1 the tree does not fit, and the symbol or place not found is named; 2 wrong argument.
HELP
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"  # say

refuse() {
    say "$@"
    say "Nothing was changed in $tree."
    exit 1
}

# kind_of_tree: the kind of patch that the features of the tree ask for.
kind_of_tree() {
    local flags=megatron/training/arguments.py
    [ -f "$tree/$flags" ] && [ -d "$tree/megatron/core/transformer" ] || refuse \
        "No Megatron-LM tree: $tree has no $flags, or no megatron/core/transformer. Name the folder that holds both;" \
        "for an older or other trainer take the split from \`megatron-balance plan\` (--format deepspeed, bridge)."
    if [ -f "$tree/megatron/core/transformer/pipeline_parallel_layer_layout.py" ] ||
        grep -q -e '--pipeline-model-parallel-layout' "$tree/$flags"; then
        kind=enable
    else
        kind=layer-assignment
    fi
}

# check_symbols: refuse unless the tree defines everything that the patches of this kind stand on.
check_symbols() {
    local file symbol missing=()
    while read -r file symbol; do
        grep -Eqs "^(class|def) $symbol\b" "$tree/$file" || missing+=("$symbol ($file)")
    done < <(grep -v '^#' "$root/patches/$kind/symbols.txt")
    [ ${#missing[@]} = 0 ] || refuse "$kind does not fit, not found: $(printf '%s, ' "${missing[@]}" | sed 's/, $//')." \
        "If they have other names or places in this tree, make the changes of patches/$kind by hand there."
}

# files_of PATCH: what it changes.
files_of() { sed -n 's|^+++ b/||p' "$1"; }

# list TEXT: that, and the files.
list() { say "$1" && files_of "$patch" | sed 's/^/  /' >&2; }

# stage PATCH FOLDER: copies of what it changes; fails when a file is missing.
stage() {
    local file
    rm -rf "$2"
    while IFS= read -r file; do
        mkdir -p "$2/$(dirname "$file")"
        cp "$tree/$file" "$2/$file" 2>/dev/null || return
    done < <(files_of "$1")
}

# applied_to FOLDER PATCH [OPTION]: `git apply` there, whatever repository or settings are around it.
applied_to() (
    unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
    cd "$1"
    GIT_CEILING_DIRECTORIES=$(dirname "$1") git -c core.autocrlf=false -c apply.ignoreWhitespace=no \
        -c apply.whitespace=nowarn apply -v ${3:+"$3"} "$2"
)

# in_time FOLDER: whether the first Megatron import of the staged script comes after enable().
in_time() {
    [ $kind != enable ] || awk '/^megatron_balance\.enable\(\)/ { ok = 1; exit }
        /^(from|import) +(megatron[. ]|gpt_builders|model_provider)/ { exit } END { exit !ok }' "$1/pretrain_gpt.py"
}

# take_over FOLDER: put the staged files in place of the tree's; on failure put back what was there.
take_over() {
    local file before=$scratch/before
    stage "$patch" "$before"
    while IFS= read -r file; do
        [ -w "$tree/$file" ] || refuse "No permission to write $tree/$file."
    done < <(files_of "$patch")
    trap '' HUP INT PIPE TERM  # all files or none
    while IFS= read -r file; do
        cp "$1/$file" "$tree/$file" || {
            cp -r "$before/." "$tree/"
            refuse "Could not write $tree/$file."
        }
    done < <(files_of "$patch")
}

# find_patch: set `patch` and `state` (fits, applied) of the variant that belongs to the tree.
find_patch() {
    local log=$scratch/log
    for patch in "$root/patches/$kind"/*.patch; do
        stage "$patch" "$scratch/reversed" || continue
        stage "$patch" "$scratch/patched"
        if applied_to "$scratch/reversed" "$patch" --reverse >/dev/null 2>&1; then
            state=applied
            return
        elif applied_to "$scratch/patched" "$patch" >/dev/null 2>"$log" && in_time "$scratch/patched"; then
            state=fits
            return
        fi
    done
    [ -f "$log" ] || refuse "$kind does not fit, not found: $(files_of "$patch" | tr '\n' ' ')"
    say "$kind does not fit: every symbol is there, but not every place as $(basename "$patch") knows it:"
    sed -n '/^error: while searching/,/^error: patch failed/p' "$log" | sed 's/^/    /' >&2
    [ $kind != enable ] || refuse "Add the lines marked + in patches/enable by hand before the first import of Megatron, or" \
        "start jobs with -m megatron_balance.run."
    refuse "Make the changes of patches/$kind by hand where they belong."
}

action=apply
case "${1:-}" in
    -h | --help) usage && exit ;;
    --check | --reverse) action=${1#--} && shift ;;
esac
[ $# = 1 ] && [ -d "$1" ] || { usage >&2 && exit 2; }
command -v git >/dev/null || { say "git is needed (for its apply command; the tree need not be a repository)." && exit 2; }

tree=$(cd "$1" && pwd -P)
scratch=$(mktemp -d)
scratch=$(cd "$scratch" && pwd -P)
trap 'rm -rf "$scratch"' EXIT

kind_of_tree
check_symbols
find_patch
name=$kind/$(basename "$patch" .patch)
case $action-$state in
    apply-fits) take_over "$scratch/patched" && list "$name is now in $tree. Changed:" ;;
    apply-applied) say "$name is in $tree already." ;;
    check-fits) list "$name fits $tree. It would change:" ;;
    check-applied) say "$name is in $tree." ;;
    reverse-applied) take_over "$scratch/reversed" && list "$name is no longer in $tree. Changed:" ;;
    reverse-fits) say "$name is not in $tree, nothing to take out." ;;
esac
