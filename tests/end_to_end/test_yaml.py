"""Runs from YAML, as users start them: LLM Foundry's own command, ours, and what they say to a mistake."""

from __future__ import annotations

import re
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from foundry_moe.cli import main
from tests.helpers.demo import BIN, DEMO, ROOT, run


@pytest.mark.parametrize("entry", ["command", "script"])
def test_llm_foundrys_own_entry_trains_our_yaml(entry, tiny_arguments, tmp_path):
    words = [BIN / "llmfoundry", "train"]
    if entry == "script":
        (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/stock_entry.md").read_text(), re.S)
        (tmp_path / "script.py").write_text(code)
        words = [sys.executable, tmp_path / "script.py"]
    done = run(*words, DEMO, *tiny_arguments(tmp_path / "run"), FSDP_VERSION="2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "batch 6/6ba | loss" in done.stdout and "fullest expert" in done.stdout
    assert (tmp_path / "run" / "expert_load.html").read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def launched(tiny_arguments, folder):
    """The demo's run on two processes: begun, gone on with, and started once more when it is done."""
    arguments = [
        *tiny_arguments(folder),
        "model.moe.mesh=auto",
        "fsdp_config={reshard_after_forward: auto}",
        "global_train_batch_size=8",
        "callbacks.run_report.interval=1ba",
    ]
    composer = (BIN / "composer", "-n", "2", "foundry_moe/train.py", DEMO, *arguments)
    return [run(*composer, f"max_duration={batches}ba") for batches in (3, 6, 6)]


def test_two_processes_train_and_report(launched):
    first = launched[0]
    assert first.returncode == 0, first.stderr[-3000:]
    for words in ("first loss", "last loss", "validation loss", "unigram loss", "checkpoint ", "sample "):
        assert f"\n{words}" in first.stdout


def test_a_mesh_that_is_auto_is_chosen_for_both_processes_at_each_start(launched):
    for done in launched:
        widths = re.findall(
            r"^mesh: \(replicate (\d), shard (\d), expert (\d)\) \(auto: .* by the plan\)$", done.stdout, re.M
        )
        assert [sorted(found) for found in widths] == [["1", "1", "2"]], done.stdout
        assert done.stdout.count("\nreshard_after_forward: true (auto: no GPU)\n") == 1


def test_its_model_answers_in_plain_transformers(launched, folder, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["export", str(folder / "checkpoints"), str(tmp_path / "out"), "--certify"])
    assert not ended.value.code
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    asked = tokenizer("The state of the union", return_tensors="pt", return_token_type_ids=False)
    answer = model.generate(**asked, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert answer.shape[1] == asked["input_ids"].shape[1] + 8
    assert tokenizer.decode(answer[0]).startswith("The state of the union")


def test_a_run_started_again_goes_on(launched):
    second = launched[1]
    assert second.returncode == 0, second.stderr[-3000:]
    assert "resuming at batch 3" in second.stdout
    assert "batch 3/6ba" not in second.stdout and "batch 4/6ba" in second.stdout


def test_a_run_that_is_done_says_so(launched):
    third = launched[2]
    assert third.returncode == 0, third.stderr[-3000:]
    assert "this run is complete: max_duration (6ba) is reached, nothing to train" in third.stdout
    assert "batch 6/6ba" not in third.stdout and "Traceback" not in third.stdout + third.stderr


MISTAKES = {
    "model.moe.num_exprts=4": "model.moe.num_exprts is not a key of model.moe; did you mean 'num_experts'?",
    "model.moe.top_k=9": "model.moe.top_k (9) must be between 1 and num_experts (8)",
    "model.moe.gate.name=topq": "there is no gate 'topq'",
    "model.moe.loss.balanse=1": "loss.balanse: gate topk has no such loss; did you mean 'balance'?",
    "algorithms.dmoe.num_experts=4": "both put experts into the model: keep one of them",
    "model.moe.loss.load=1": "loss.load needs gate.noise: true",
    "model.moe.gate.scale=0": "scale (0) must be above 0",
    "model.moe=null": "model.moe.num_experts is missing: give it a whole number",
    "model.name=mpt_causal_lm": "model.name: mpt_causal_lm does not read it; move its keys to algorithms.dmoe",
    "model.name=dmoe_causal_llm": "model.name: dmoe_causal_llm is not registered; did you mean 'dmoe_causal_lm'?",
    "callbacks.elastic_chekpoint.folder=x": "elastic_chekpoint is not registered; did you mean 'elastic_checkpoint'?",
    "callbacks.elastic_checkpoint.interval=50": "elastic_checkpoint.interval must be a time (90s, 30m, 2h)",
    "algorithms=[dmoe]": "algorithms must be a mapping of keys to values, not ['dmoe']",
    "train_loader.dataset.local=/nowhere": "train_loader.dataset.local (/nowhere): there is no such folder",
    "tokenizer.name=a/path/nowhere": "tokenizer.name (a/path/nowhere): there is no such folder",
    "tp_config.strategy=ffn": "dMoE layers do not support tensor parallelism",
    "model.init_device=meta": "initialising experts from meta needs a mesh; add mesh",
    "model.moe.init=upcycle": "has no trained FFN to copy; use init: random, or algorithms.dmoe on a pretrained model",
    "max_duration": "max_duration: an override is key=value",
}


@pytest.mark.quick
@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(override, capsys, monkeypatch, tmp_path):
    from foundry_moe import train

    for name in ("tokenizer", "train", "val"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py", str(DEMO), f"variables.data={tmp_path}", override])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and MISTAKES[override] in error


def test_experts_from_meta_need_a_mesh():
    from foundry_moe.launch.run_config import launched_machine, own_mistakes, read_moe

    def checked(moe: dict, **keys):
        model = {"name": "dmoe_causal_lm", "init_device": "meta", "moe": {"num_experts": 4, **moe}}
        run = {"model": model, **keys}
        return list(own_mistakes(run, read_moe(run), launched_machine()))

    (sentence,) = checked({})
    assert "init_device (meta): initialising experts from meta needs a mesh; add mesh" in sentence
    assert checked({"mesh": {"expert": 1}}) == checked({}, algorithms={"dmoe_mesh": {"expert": 1}}) == []


def test_experts_in_ffn_config_are_refused_with_their_place():
    from foundry_moe.launch.run_config import read_moe

    with pytest.raises(ValueError, match=r"ffn_type \(dmoe\) is not an FFN: move the keys of the experts to model.moe"):
        read_moe({"model": {"name": "dmoe_causal_lm", "ffn_config": {"ffn_type": "dmoe", "num_experts": 4}}})


def test_a_mesh_that_the_world_cannot_hold_is_named(capsys, monkeypatch):
    from foundry_moe import train

    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(sys, "argv", ["train.py", str(DEMO), "model.moe.mesh.expert=4"])
    with pytest.raises(SystemExit):
        train.main()
    assert "mesh.expert (4)" in capsys.readouterr().err


def test_a_mesh_without_fsdp2_is_refused(capsys, monkeypatch):
    from foundry_moe import train

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", str(DEMO), "model.moe.mesh.expert=2"])
    with pytest.raises(SystemExit):
        train.main()
    assert "add `fsdp_config: {}`" in capsys.readouterr().err


def test_fsdp1_is_refused(capsys, monkeypatch):
    from foundry_moe import train

    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", str(DEMO), "fsdp_config.activation_checkpointing=true"])
    with pytest.raises(SystemExit):
        train.main()
    assert "FSDP_VERSION (1): dMoE layers need FSDP2" in capsys.readouterr().err


def test_the_launcher_passes_the_sentence_and_the_code_on():
    done = run(BIN / "composer", "-n", "1", "foundry_moe/train.py", DEMO, "model.moe.top_k=9")
    assert done.returncode != 0
    assert "error: model.moe.top_k (9)" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_failure_that_is_not_the_users_keeps_its_traceback():
    from foundry_moe.launch.user_errors import run_cleanly

    def broken() -> int:
        return int("seven")

    with pytest.raises(ValueError, match="seven"):
        run_cleanly(broken)
