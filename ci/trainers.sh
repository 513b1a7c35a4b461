#!/usr/bin/env bash
# The proof that the integrations are exact inside the trainers as they are: their real source, imported from checkouts.
#
#   TRAINERS=/folder bash ci/trainers.sh           # /folder/slime, /folder/miles, ...: checkouts that are there already
#   bash ci/trainers.sh --clone /folder            # first fetch slime, miles and ROLL, where the folder has none
#   bash ci/trainers.sh --clone /folder all        # everything that a test reads: the table below, and three wheels
#   bash ci/trainers.sh --clone /folder slime=v0.3.0 miles=v0.1.0 ROLL=    # other tags or whole commits, or none
#
# Nothing of the trainers is stored in this repository. PYTHON= chooses the interpreter, as in ci/test.sh (Python 3.12:
# Megatron-Core has to be one with megatron.training); VENV_PYTHON= one that has everything already, the packages in
# tests/trainers/requirements.txt included, which are installed here otherwise.
set -euo pipefail
shopt -s extglob
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# name, repository, commit: those of the launch scripts, and of other tests
COMMITS="$(sed -n 's/^# //p' tests/trainers/launch_scripts.tsv)
vime https://github.com/CalvinXKY/vime 1a13bb8c4cde099a582cb2062b2bb2f4de9ee1e4
Megatron-LM https://github.com/NVIDIA/Megatron-LM d98e8a64ddf34856e74b24714e3bedb2f5a39553
Megatron-Lite https://github.com/NVIDIA/Megatron-LM 515fe3a1845f3fa0d9bdc11254b6b24b0a240432
Automodel https://github.com/NVIDIA-NeMo/Automodel 8ba3aef257b52dfb69e5c2aace3a7132708401a6"
WHEELS="ms-swift==4.6.0 mcore-bridge==1.6.5 verl==0.9.1"

fetch() { # name, repository, commit
    echo "Fetching $2 at $3 into $TRAINERS/$1 ..."
    local folder="$TRAINERS/$1" depth=()
    # A new checkout has its name when it is whole.
    [ -d "$folder" ] || { folder="$TRAINERS/.$1" && depth=(--depth 1) && git init --quiet "$folder"; }
    git -C "$folder" fetch --quiet "${depth[@]}" "$2" "$3"
    git -C "$folder" checkout --quiet FETCH_HEAD
    [ -d "$TRAINERS/$1" ] || mv "$folder" "$TRAINERS/$1"
}

if [ "${1:-}" = --clone ]; then
    TRAINERS="${2:?bash ci/trainers.sh --clone FOLDER: which folder?}"
    shift 2
    mkdir -p "$TRAINERS"
    wanted=" slime miles ROLL "
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
    while [[ "${1:-}" =~ ^(slime|miles|ROLL)=(.*)$ ]]; do
        chosen[${BASH_REMATCH[1]}]="${BASH_REMATCH[2]}"
        shift
    done
    while read -r name url commit; do
        commit="${chosen[$name]-$commit}"
        # A checkout that is there stays as it is, unless its commit is asked for.
        if [[ "$wanted" = *" $name "* && -n "$commit" ]] && [[ ! -d "$TRAINERS/$name" || -n "${chosen[$name]:-}" ]]; then
            fetch "$name" "$url" "$commit"
        fi
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
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps -r tests/trainers/requirements.txt
fi
for path in "$TRAINERS"/*/; do
    echo "$(basename "$path"): $(git -C "$path" rev-parse --short HEAD 2>/dev/null || echo 'no git checkout')"
done
absent=()
for name in $(cut -d ' ' -f 1 <<<"$COMMITS") ${WHEELS//==*([^ ])/}; do
    [ -d "$TRAINERS/$name" ] || absent+=("$name")
done
[ ${#absent[@]} = 0 ] || echo "Tests of these are skipped, which \`--clone FOLDER all\` fetches: ${absent[*]}"
# What the proof found, a line each; the trainers' own warnings go to stderr.
"$VENV_PYTHON" -m pytest -q -rs --no-header -W ignore --capture=no tests/trainers "$@"
