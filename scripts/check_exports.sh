#!/usr/bin/env bash
# Exports small models of every kind, and reads them and the folders that are named with the newest transformers 5,
# in an environment of its own that has nothing of this package: torch comes from the project's.
#
# usage: check_exports.sh VENV [EXPORTED_FOLDER...]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
second=.venv-transformers
if ! [ -x "$second/bin/python" ]; then
    "$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$second"
    "$venv/bin/uv" pip install --quiet --python "$second/bin/python" "transformers>=5,<6"
    # torch and numpy: after the second environment's own packages, so that its transformers is found first
    "$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        >"$("$second/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth"
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$venv/bin/python" -m tests.helpers.exporting "$folder"
"$second/bin/python" scripts/read_exports.py "$folder"/*/exported "$@"
