# Sourced by the scripts that need a virtual environment: chooses an interpreter and installs into it, once.
#
#   source ci/environment.sh
#   make_environment test        # or examples, docs: afterwards $VENV_PYTHON runs with the package and what these need
#
# PYTHON= chooses the interpreter, TORCH= and MEGATRON= other versions of torch and megatron-core. VENV_PYTHON= names an
# interpreter that has everything, and nothing is made. The environment is .venv-<version> in the project's root (with
# TORCH=, .venv-<version>-torch-<version>, with MEGATRON= likewise). It is installed again only if its ingredients change.

# Every process would compile torch and Megatron anew, which takes longer than to import them: 10 seconds of a core.
unset PYTHONDONTWRITEBYTECODE
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
GIVEN="${VENV_PYTHON:-}"

# The oldest supported megatron-core.
OLDEST_MEGATRON=0.16.0

# The versions that the tests are run with.
constraints() {
    echo "torch==${TORCH:-2.13.0}"
    echo "megatron-core==${MEGATRON:-0.19.2}"
}

# Version of an interpreter that truly runs and can make environments; nothing for one that does not (a shim whose
# version is not there answers on stderr and fails).
version_of() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# The candidates for a name such as python3.12: itself, then the versions that pyenv keeps beside its shims.
interpreters_named() {
    echo "$1"
    case "$1" in
        python3.*) ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/${1#python}".*/bin/"$1" 2>/dev/null || true ;;
    esac
}

find_python() {
    local name candidate version
    for name in ${PYTHON:-python3.12 python3.13 python3 python}; do
        for candidate in $(interpreters_named "$name"); do
            version="$(version_of "$candidate")" || continue
            case "$version" in
                3.12 | 3.13) echo "$candidate" && return 0 ;;
            esac
        done
    done
    {
        if [ -n "${PYTHON:-}" ]; then
            echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 that runs and has the modules venv and ensurepip."
        else
            echo "No Python 3.12 or 3.13 that runs and has the modules venv and ensurepip was found."
        fi
        echo "Install Python 3.12 (Debian, Ubuntu: python3.12 and python3.12-venv) or name one: PYTHON=/path/to/python3.12"
    } >&2
    return 1
}

make_environment() {
    local for="$1" python version venv wanted what
    [ -z "$GIVEN" ] || return 0
    case "$for" in
        docs) what=(--editable "$ROOT[docs]") ;;
        examples) what=(--editable "$ROOT[megatron,tools]" --requirement "$ROOT/examples/requirements.txt") ;;
        test) what=(--editable "$ROOT[megatron,tools,docs,test]" --requirement "$ROOT/examples/requirements.txt") ;;
    esac
    python="$(find_python)" || return 1
    version="$(version_of "$python")"
    venv="$ROOT/.venv-$version${TORCH:+-torch-$TORCH}${MEGATRON:+-megatron-$MEGATRON}"
    VENV_PYTHON="$venv/bin/python"
    wanted="$(cd "$ROOT" && cat setup.py pyproject.toml ci/environment.sh examples/requirements.txt | cksum)"
    if [ "$(cat "$venv/installed-$for" 2>/dev/null)" = "$wanted" ] && version_of "$VENV_PYTHON" >/dev/null; then
        return 0
    fi
    echo "Installing megatron_pg for Python $version into ${venv#"$ROOT"/} (several minutes the first time) ..."
    if ! version_of "$VENV_PYTHON" >/dev/null; then
        "$python" -m venv --clear "$venv" || return 1
    fi
    constraints >"$venv/constraints.txt"
    # Of 14,000 files the tests import a fourth: Python compiles those when it first does, and keeps what it made.
    if ! "$VENV_PYTHON" -m pip install --quiet --no-compile --disable-pip-version-check --constraint "$venv/constraints.txt" \
        "${what[@]}" >"$venv/install.log" 2>&1; then
        tail -n 20 "$venv/install.log" >&2
        echo "The installation failed; the whole log is ${venv#"$ROOT"/}/install.log" >&2
        return 1
    fi
    echo "$wanted" >"$venv/installed-$for"
}

# Unpacks the oldest supported megatron-core into a folder, printed, that comes before the environment's own on PYTHONPATH.
oldest_megatron() {
    local folder="$ROOT/.venv-oldest-megatron"
    if [ ! -e "$folder/$OLDEST_MEGATRON" ]; then
        rm -rf "$folder"
        "$VENV_PYTHON" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check --target "$folder" \
            "megatron-core==$OLDEST_MEGATRON" >&2 || return 1
        # A namespace package would add the environment's megatron.training.
        touch "$folder/megatron/__init__.py" "$folder/$OLDEST_MEGATRON"
    fi
    echo "$folder"
}
