"""`train.py` refuses what `check` refuses, in the same sentence, before anything slow is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foundry_moe import train
from foundry_moe.cli import main as command
from foundry_moe.launch.user_errors import USER_ERROR

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "yamls" / "demo" / "cpu.yaml")
SIX = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}


def told(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (["optimzer.lr=3"], {}, "optimzer is not a key of a run; did you mean 'optimizer'?"),
        (["model.n_layer=3"], {}, "model.n_layer is not a key of model; did you mean 'n_layers'?"),
        (["model.attn_config.attn_implx=torch"], {}, "did you mean 'attn_impl'?"),
        (["fsdp_config={reshard_after_fwd: true}"], {}, "did you mean 'reshard_after_forward'?"),
        (["fsdp_config={}"], {"FSDP_VERSION": "1"}, "FSDP_VERSION (1): dMoE layers need FSDP2"),
        (["precision=amp_fp8"], {}, "precision (amp_fp8): dMoE layers compute in"),
        (["max_seq_len=1"], {}, "max_seq_len (1) must be 2 or more"),
        (["device_train_microbatch_size=0"], {}, "must be a number above 0 or auto"),
        (
            ["model.moe.mesh={expert: 4}", "fsdp_config={}"],
            SIX,
            "model.moe.mesh.expert (4) does not fit",
        ),
        (["seed=${nope}"], {}, "nope"),
    ],
)
def test_a_mistake_is_the_same_sentence_and_exit_code_as_in_a_check(
    capsys, monkeypatch, words, environment, sentence
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as checked:
        command(["check", DEMO, *words])
    of_check = told(capsys)
    monkeypatch.setattr(sys, "argv", ["train.py", DEMO, *words])
    with pytest.raises(SystemExit) as trained:
        train.main()
    assert told(capsys) == of_check and sentence in of_check
    assert checked.value.code == trained.value.code == USER_ERROR == 2


def test_the_script_refuses_before_it_imports_a_trainer() -> None:
    words = [sys.executable, "-X", "importtime", "foundry_moe/train.py", DEMO, "optimzer.lr=3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == USER_ERROR and done.stdout == ""
    assert len(said) == 1 and said[0].startswith("error: optimzer is not a key of a run; did you mean 'optimizer'?")
    assert "foundry_moe" in imported and not imported & {"torch", "composer", "llmfoundry", "transformers", "boto3"}
