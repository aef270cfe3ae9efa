"""Reads exported folders with plain transformers, without this package, and compares logits with those saved beside.

usage: python scripts/read_exports.py FOLDER...
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

TOLERANCE = 1e-3  # of the logits' standard deviation, as in the certificate


def read(folder: Path) -> str:
    """Loads, compares and generates; returns a summary.

    Raises:
        AssertionError: something was missing, strange or different.
    """
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: names for key, names in report.items() if names}
    assert not wrong, wrong
    saved = np.load(folder / "certificate.npz")
    ids = torch.from_numpy(saved["tokens"])
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float().numpy()
    difference = float(np.abs(logits - saved["logits"]).max() / saved["logits"].std())
    assert difference < TOLERANCE, difference
    summary = f"{type(model).__name__}: logits differ by {difference:.1e} of their standard deviation"
    if (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer("The state of the union", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        assert answer.shape[1] > prompt["input_ids"].shape[1]
        summary += f"; it answers {tokenizer.decode(answer[0])!r}"
    else:
        assert model.generate(ids[:1, :4], max_new_tokens=4, do_sample=False).shape[1] > 4
    return summary


def main(folders: list[str]) -> int:
    """One line for each folder; 1 if one is not as it should be."""
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    failed = 0
    for folder in folders:
        try:
            print(f"{folder}: {read(Path(folder))}")
        except Exception as error:  # all folders are looked at
            failed = 1
            print(f"{folder}: FAILED, {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
