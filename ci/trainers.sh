#!/usr/bin/env bash
# Test the integrations inside the real source of the trainers, imported from checkouts.
#
#   TRAINERS=/folder bash ci/trainers.sh           # existing checkouts /folder/slime, /folder/miles, ...
#   bash ci/trainers.sh --clone /folder            # first fetch slime and miles, unless the folder has them
#   bash ci/trainers.sh --clone /folder all        # fetch everything that a test reads: the table below, and a wheel
#   bash ci/trainers.sh --clone /folder slime=v0.3.0 miles=    # different tags or full commits, or none
#
# This repository has no code of the trainers. PYTHON= chooses the interpreter, as in ci/test.sh (Python 3.12 with
# megatron.training). VENV_PYTHON= names an interpreter that has everything, including the packages in
# tests/trainers/requirements.txt, which are installed here otherwise.
set -euo pipefail
shopt -s extglob
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# name, repository, commit: for the configurations, and for other tests
COMMITS="$(sed -n 's/^# //p' tests/trainers/configurations.tsv)
slime https://github.com/THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
miles https://github.com/radixark/miles 31f1ca961a94cb860cec3b2dea34ec332bfa8f76
SkyRL https://github.com/NovaSky-AI/SkyRL a9564572eb8e91076be43c1bd5e4615e3de17265
Megatron-LM https://github.com/NVIDIA/Megatron-LM d98e8a64ddf34856e74b24714e3bedb2f5a39553"
WHEELS="verl==0.9.1"

fetch() { # name, repository, commit
    echo "Fetching $2 at $3 into $TRAINERS/$1 ..."
    local folder="$TRAINERS/$1" depth=()
    # A new checkout gets its name when it is complete.
    [ -d "$folder" ] || { folder="$TRAINERS/.$1" && depth=(--depth 1) && git init --quiet "$folder"; }
    git -C "$folder" fetch --quiet "${depth[@]}" "$2" "$3"
    git -C "$folder" checkout --quiet FETCH_HEAD
    [ -d "$TRAINERS/$1" ] || mv "$folder" "$TRAINERS/$1"
}

if [ "${1:-}" = --clone ]; then
    TRAINERS="${2:?bash ci/trainers.sh --clone FOLDER: which folder?}"
    shift 2
    mkdir -p "$TRAINERS"
    wanted=" slime miles "
    if [ "${1:-}" = all ]; then
        wanted=" $(cut -d ' ' -f 1 <<<"$COMMITS" | tr '\n' ' ') "
        for wheel in $WHEELS; do
            [ -d "$TRAINERS/${wheel%%=*}" ] && continue
            "${VENV_PYTHON:-python3}" -m pip download --quiet --no-deps --dest "$TRAINERS/wheels" "$wheel"
            file=("$TRAINERS/wheels/$(tr - _ <<<"${wheel%%=*}")"-*.whl)
            python3 -m zipfile -e "${file[0]}" "$TRAINERS/${wheel%%=*}"
        done
        shift
    fi
    declare -A chosen=()
    while [[ "${1:-}" =~ ^(slime|miles)=(.*)$ ]]; do
        chosen[${BASH_REMATCH[1]}]="${BASH_REMATCH[2]}"
        shift
    done
    while read -r name url commit; do
        commit="${chosen[$name]-$commit}"
        # An existing checkout stays unchanged, unless its commit is given.
        if [[ "$wanted" = *" $name "* && -n "$commit" ]] && [[ ! -d "$TRAINERS/$name" || -n "${chosen[$name]:-}" ]]; then
            fetch "$name" "$url" "$commit"
        fi
    done <<<"$COMMITS"
fi
if [ -z "${TRAINERS:-}" ] || [ ! -d "$TRAINERS" ]; then
    echo "TRAINERS=${TRAINERS:-} is not a folder. Name the folder with the checkouts, or run ci/trainers.sh --clone FOLDER." >&2
    exit 1
fi
TRAINERS="$(cd "$TRAINERS" && pwd)"
export TRAINERS OMP_NUM_THREADS=1
if [ -z "${VENV_PYTHON:-}" ]; then
    source ci/environment.sh
    make_environment test
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps -r tests/trainers/requirements.txt
fi
for path in "$TRAINERS"/*/; do
    echo "$(basename "$path"): $(git -C "$path" rev-parse --short HEAD 2>/dev/null || echo 'no git checkout')"
done
absent=()
for name in $(cut -d ' ' -f 1 <<<"$COMMITS") ${WHEELS//==*([^ ])/}; do
    [ -d "$TRAINERS/$name" ] || absent+=("$name")
done
[ ${#absent[@]} = 0 ] || echo "Tests of these trainers are skipped (\`--clone FOLDER all\` fetches them): ${absent[*]}"
# Print a line per test. The trainers' own warnings go to stderr.
"$VENV_PYTHON" -m pytest -q -rs --no-header -W ignore --capture=no tests/trainers "$@"
