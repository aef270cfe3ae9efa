#!/usr/bin/env bash
# Makes a virtual environment with foundry_moe in it, from any CPython 3.10 to 3.12 on this host.
#
# usage: make_env.sh FOLDER modern|stock|newest
#   modern  torch 2.11, through requirements/modern.txt; the project is installed editable, for development
#   stock   what a plain `pip install '.[foundry]'` resolves; the project is installed as a user gets it
#   newest  the newest torch and Triton of the index, through requirements/newest.txt; for tests of what breaks next
# Does nothing where the folder is up to date with setup.py and the requirements.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 stack=$2

stamp=$env/.made-from
wanted=$(cat setup.py pyproject.toml requirements/*.txt scripts/make_env.sh <(echo "$stack") | sha256sum)
if [ -x "$env/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi

find_python() {
    # a pyenv shim may be on PATH for a version that is not selected: only one that runs counts
    local minor candidate
    for minor in 12 11 10; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python python3; do
            if "$candidate" -c "import sys, venv; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then
                command -v "$candidate"
                return
            fi
        done
    done
    echo "make_env: no Python 3.10, 3.11 or 3.12 with the venv module was found: install one (Debian: python3 python3-venv)" >&2
    return 1
}

if ! [ -x "$env/bin/python" ]; then
    python=$(find_python)
    echo "make_env: $env, $stack stack, from $("$python" --version) ($python)"
    "$python" -m venv "$env"
fi
"$env/bin/python" -m pip install --quiet --disable-pip-version-check "uv>=0.5"
install=("$env/bin/uv" pip install --quiet --python "$env/bin/python")
case $stack in
    modern) "${install[@]}" --override requirements/modern.txt --editable ".[foundry,test,demo,docs]" ;;
    newest) "${install[@]}" --override requirements/newest.txt --editable ".[foundry,test,demo]" ;;
    stock) "${install[@]}" --reinstall-package foundry_moe ".[foundry,test,demo]" ;;
    *) echo "make_env: STACK must be modern, stock or newest, not $stack" >&2; exit 2 ;;
esac
echo "$wanted" >"$stamp"
