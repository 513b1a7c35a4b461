#!/usr/bin/env bash
# The proof that the integrations are exact inside the trainers as they are: their real source, imported from checkouts.
#
#   TRAINERS=/folder bash ci/trainers.sh           # /folder/slime, /folder/miles, ...: checkouts that are there already
#   bash ci/trainers.sh --clone /folder            # clone the commits below into a folder first, where it has none
#   bash ci/trainers.sh --clone /folder slime=v0.3.0 miles=v0.1.0 ROLL=    # other commits, or none
#
# Nothing of the trainers is stored in this repository. PYTHON= chooses the interpreter, as in ci/test.sh (Python 3.12:
# Megatron-Core has to be one with megatron.training); VENV_PYTHON= one that has everything already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# name, repository, commit
COMMITS="slime https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
miles https://github.com/radixark/miles 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
ROLL https://github.com/alibaba/ROLL 8eb27cc2dc34c4d1310b169d9b86d339004d811a"

if [ "${1:-}" = --clone ]; then
    TRAINERS="${2:?bash ci/trainers.sh --clone FOLDER: which folder?}"
    shift 2
    declare -A chosen=()
    while [[ "${1:-}" =~ ^(slime|miles|ROLL)=(.*)$ ]]; do
        chosen[${BASH_REMATCH[1]}]="${BASH_REMATCH[2]}"
        shift
    done
    while read -r name url commit; do
        commit="${chosen[$name]-$commit}"
        [ -z "$commit" ] && continue
        if [ -d "$TRAINERS/$name" ]; then
            # A commit that was asked for is the one that runs.
            [ -z "${chosen[$name]:-}" ] || git -C "$TRAINERS/$name" checkout --quiet "$commit"
            continue
        fi
        echo "Cloning $url at $commit into $TRAINERS/$name ..."
        git clone --quiet "$url" "$TRAINERS/$name"
        git -C "$TRAINERS/$name" checkout --quiet "$commit"
    done <<<"$COMMITS"
fi
if [ -z "${TRAINERS:-}" ] || [ ! -d "$TRAINERS" ]; then
    echo "TRAINERS=${TRAINERS:-} is no folder: name the one that holds the checkouts, or: bash ci/trainers.sh --clone FOLDER" >&2
    exit 1
fi
TRAINERS="$(cd "$TRAINERS" && pwd)"
export TRAINERS OMP_NUM_THREADS=1
if [ -z "${VENV_PYTHON:-}" ]; then
    source ci/environment.sh
    make_environment test
fi
for path in "$TRAINERS"/*/; do
    echo "$(basename "$path"): $(git -C "$path" rev-parse --short HEAD 2>/dev/null || echo 'no git checkout')"
done
# What the proof found, a line each; the trainers' own warnings go to stderr.
"$VENV_PYTHON" -m pytest -q -rs --no-header -W ignore --capture=no tests/trainers "$@"
