#!/usr/bin/env bash
# Makes .venv-transformers: the base install of this tree (no Composer, no LLM Foundry) beside transformers 5, for the
# tests of foundry_moe/integrations and of the examples with its trainers. The versions of torch and Triton are those of
# the project's environment, so that uv links their files instead of copying them.
#
# usage: make_transformers_env.sh VENV FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 env=$2

stamp=$env/.made-from
wanted=$(cat setup.py scripts/make_transformers_env.sh | sha256sum)
if [ -x "$env/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
"$venv/bin/uv" venv --quiet --clear --python "$venv/bin/python" "$env"
versions=$("$venv/bin/python" -c "
from importlib.metadata import version
print(*(f'{name}=={version(name)}' for name in ('torch', 'triton')))")
# Triton 3.6's interpreter fails with numpy 2.5
# shellcheck disable=SC2086
"$venv/bin/uv" pip install --quiet --python "$env/bin/python" --editable ".[transformers]" $versions \
    "numpy<2.4" pytest pytest-timeout pytest-xdist trl kernels
if "$env/bin/python" -c "import composer" 2>/dev/null; then
    echo "make_transformers_env: the base install brought Composer: see REQUIRES in setup.py" >&2
    exit 1
fi
echo "$wanted" >"$stamp"
