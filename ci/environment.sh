# Sourced by the scripts that need a virtual environment: chooses an interpreter and installs into it, once.
#
#   source ci/environment.sh
#   make_environment test        # or examples, docs: afterwards $VENV_PYTHON runs with the package and what these need
#
# PYTHON= chooses the interpreter, TORCH= another torch; VENV_PYTHON= names an interpreter that has everything, and nothing
# is made. The environment is .venv-<version> in the project's root (with TORCH=, .venv-<version>-torch-<version>); it is
# installed again only when what it is made of changes.

# Every process would compile torch and Megatron anew, which takes longer than to import them: 10 seconds of a core.
unset PYTHONDONTWRITEBYTECODE
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
GIVEN="${VENV_PYTHON:-}"

# The versions that the tests are run with. 0.16.1 is the newest megatron-core that has a wheel for Python 3.11.
constraints() {
    echo "torch==${TORCH:-2.13.0}"
    case "$1" in
        3.11) echo "megatron-core==0.16.1" ;;
        *) echo "megatron-core==0.19.2" ;;
    esac
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
    for name in ${PYTHON:-python3.12 python3.11 python3 python}; do
        for candidate in $(interpreters_named "$name"); do
            version="$(version_of "$candidate")" || continue
            case "$version" in
                3.11 | 3.12 | 3.13) echo "$candidate" && return 0 ;;
            esac
        done
    done
    {
        if [ -n "${PYTHON:-}" ]; then
            echo "PYTHON=$PYTHON is no Python of 3.11 to 3.13 that runs and has the modules venv and ensurepip."
        else
            echo "No Python of 3.11 to 3.13 that runs and has the modules venv and ensurepip was found."
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
        test) what=(--editable "$ROOT[megatron,tools,docs,test]" --requirement "$ROOT/examples/trainer/requirements.txt") ;;
    esac
    python="$(find_python)" || return 1
    version="$(version_of "$python")"
    venv="$ROOT/.venv-$version${TORCH:+-torch-$TORCH}"
    VENV_PYTHON="$venv/bin/python"
    wanted="$(cd "$ROOT" && cat setup.py pyproject.toml ci/environment.sh examples/requirements.txt examples/trainer/requirements.txt | cksum)"
    if [ "$(cat "$venv/installed-$for" 2>/dev/null)" = "$wanted" ] && version_of "$VENV_PYTHON" >/dev/null; then
        return 0
    fi
    echo "Installing megatron_pg and what its $for needs for Python $version into ${venv#"$ROOT"/} (several minutes the first time) ..."
    if ! version_of "$VENV_PYTHON" >/dev/null; then
        "$python" -m venv --clear "$venv" || return 1
    fi
    constraints "$version" >"$venv/constraints.txt"
    # Of 14,000 files the tests import a fourth: Python compiles those when it first does, and keeps what it made.
    if ! "$VENV_PYTHON" -m pip install --quiet --no-compile --disable-pip-version-check --constraint "$venv/constraints.txt" \
        "${what[@]}" >"$venv/install.log" 2>&1; then
        tail -n 20 "$venv/install.log" >&2
        echo "The installation failed; the whole log is ${venv#"$ROOT"/}/install.log" >&2
        return 1
    fi
    echo "$wanted" >"$venv/installed-$for"
}
