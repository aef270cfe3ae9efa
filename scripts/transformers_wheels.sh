#!/usr/bin/env bash
# Collects what transformers 5.23 and this tree's core need beyond torch 2.11, Triton 3.6 and numpy, for a GPU host
# without an index: 29 wheels, 27 MB.
#
# usage: transformers_wheels.sh FOLDER [PYTHON]      (PYTHON has pip and the host's Python version)
# there: pip install --no-index --find-links FOLDER transformers omegaconf xxhash
set -euo pipefail
folder=$1 python=${2:-python}
"$python" -m pip download --quiet --dest "$folder" --only-binary :all: --no-deps \
    transformers==5.23.0 tokenizers==0.23.3 huggingface-hub==2.4.0 hf-xet==1.8.0 httpx2==2.16.2 httpcore2==2.16.2 \
    truststore anyio idna h11 certifi regex safetensors pyyaml tqdm filelock fsspec packaging click typer shellingham \
    rich markdown-it-py mdurl pygments typing-extensions annotated-doc omegaconf xxhash
