"""Reads exported folders with vLLM, without this package, and compares log-probabilities with the logits saved beside.

usage: python scripts/serve_exports.py FOLDER...
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import vllm

TOLERANCE = 1e-3  # of the logits' standard deviation, as in the certificate
ONE = "--one"


def serve(folder: str) -> str:
    """Scores the certificate's tokens and generates; returns a summary.

    Raises:
        AssertionError: a log-probability differs.
    """
    saved = np.load(f"{folder}/certificate.npz")
    logits_BSV = saved["logits"].astype(np.float64)
    expected_BSV = logits_BSV - np.logaddexp.reduce(logits_BSV, axis=-1, keepdims=True)
    server = vllm.LLM(
        folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4
    )
    settings = vllm.SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=5, detokenize=False)
    outputs = server.generate([{"prompt_token_ids": ids} for ids in saved["tokens"].tolist()], settings)
    off = [
        abs(found.logprob - expected_BSV[row, position - 1, token])
        for row, output in enumerate(outputs)
        for position, of_tokens in enumerate(output.prompt_logprobs)
        for token, found in (of_tokens or {}).items()  # the first token has none
    ]
    difference = max(off) / logits_BSV.std()
    assert difference < TOLERANCE, f"log-probabilities differ by {difference:.1e} of the logits' standard deviation"
    return f"{len(off)} log-probabilities differ by at most {difference:.1e} of the logits' standard deviation"


def main(folders: list[str]) -> int:
    """One line for each folder, each in a process of its own; 1 if one is not as it should be."""
    if folders[0] == ONE:
        print(f"{folders[1]}: {serve(folders[1])}")
        return 0
    print(f"vLLM {vllm.__version__}", flush=True)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    failed = 0
    for folder in folders:
        command = [sys.executable, __file__, ONE, folder]
        done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=False)
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        failed |= done.returncode != 0
        said = lines[-1] if lines else f"exit code {done.returncode}"
        print(said if done.returncode == 0 else f"{folder}: FAILED, {said}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
