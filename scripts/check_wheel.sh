#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel into build/dist; checks both with twine; installs the wheel into an environment
# of its own, runs `foundry-moe --help` there and has mypy check a user's program. torch and Triton are those of VENV,
# whose files uv links.
#
# usage: check_wheel.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 env=build/wheel-env

rm -rf build/dist "$env"
"$venv/bin/uv" build --quiet --out-dir build/dist
"$venv/bin/uv" tool run --quiet twine check --strict build/dist/*.whl build/dist/*.tar.gz
"$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$env"
versions=$("$venv/bin/python" -c "
from importlib.metadata import version
print(*(f'{name}=={version(name)}' for name in ('torch', 'triton')))")
# shellcheck disable=SC2086
"$venv/bin/uv" pip install --quiet --python "$env/bin/python" build/dist/*.whl $versions
env=$PWD/$env mypy=$(realpath "$venv")/bin/mypy
cd "$env" # not the sources
unset PYTHONPATH
"$env/bin/foundry-moe" --help
"$env/bin/python" -c "import foundry_moe_kernels, foundry_moe.sparse; assert '$env' in foundry_moe.sparse.__file__"
cat >user.py <<'EOF'
from foundry_moe import MoEConfig, MoELayer
reveal_type(MoELayer)
MoEConfig(num_experts=8, topk=2)
EOF
types=$("$mypy" --python-executable "$env/bin/python" user.py) || true
for words in "(d_model: int, config: foundry_moe.config.MoEConfig" 'Unexpected keyword argument "topk"' "Found 1 error"; do
    case $types in *"$words"*) ;; *) echo "mypy does not say '$words': $types" && exit 1 ;; esac
done
