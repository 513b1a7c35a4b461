# Choose an interpreter and make a virtual environment once, for scripts that source this file.
#
#   source ci/environment.sh
#   make_environment test        # or examples, docs: then $VENV_PYTHON runs with the package and its dependencies
#
# PYTHON= chooses the interpreter, TORCH= and MEGATRON= different versions of torch and megatron-core. VENV_PYTHON= names
# an interpreter that has everything, so that no environment is made. The environment is .venv-<version> in the project's
# root (with -torch-<version> or -megatron-<version> added). It is installed again only if its inputs change.

# Otherwise every process would compile torch and Megatron again, which takes 10 seconds of a core.
unset PYTHONDONTWRITEBYTECODE
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
GIVEN="${VENV_PYTHON:-}"

# The oldest supported megatron-core.
OLDEST_MEGATRON=0.16.0

# The versions for the tests.
constraints() {
    echo "torch==${TORCH:-2.13.0}"
    echo "megatron-core==${MEGATRON:-0.19.2}"
}

# Version of an interpreter that runs and can make environments, or nothing (a shim without its version fails).
version_of() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Candidates for a name such as python3.12: the name, then pyenv's versions.
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
    # The tests import a quarter of 14,000 files, which Python compiles at first import.
    if ! "$VENV_PYTHON" -m pip install --quiet --no-compile --disable-pip-version-check --constraint "$venv/constraints.txt" \
        "${what[@]}" >"$venv/install.log" 2>&1; then
        tail -n 20 "$venv/install.log" >&2
        echo "The installation failed. The full log is ${venv#"$ROOT"/}/install.log" >&2
        return 1
    fi
    echo "$wanted" >"$venv/installed-$for"
}

# Install the oldest supported megatron-core into a folder to put first on PYTHONPATH, and print the folder.
oldest_megatron() {
    local folder="$ROOT/.venv-oldest-megatron"
    if [ ! -e "$folder/$OLDEST_MEGATRON" ]; then
        rm -rf "$folder"
        "$VENV_PYTHON" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check --target "$folder" \
            "megatron-core==$OLDEST_MEGATRON" >&2 || return 1
        # Without __init__.py a namespace package would add the environment's megatron.training.
        touch "$folder/megatron/__init__.py" "$folder/$OLDEST_MEGATRON"
    fi
    echo "$folder"
}
