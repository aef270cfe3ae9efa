"""A run is checked whole, against LLM Foundry's and Composer's own keys, before either is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foundry_moe.cli import main
from foundry_moe.commands import check as check_command
from foundry_moe.config import MoEConfig
from foundry_moe.launch import foundry_keys, run_config
from foundry_moe.launch.run_config import check_device, check_whole_run, load_run, plain
from foundry_moe.launch.run_files import file_mistakes, missing_files
from foundry_moe.launch.run_values import whole_paths
from foundry_moe.schema import MistakesError, UserError
from scripts import make_run_keys
from tests.chaos.fuzz_yamls import run_cases

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "yamls" / "demo" / "cpu.yaml")
HF = "model={name: hf_causal_lm, pretrained_model_name_or_path: a/b, pretrained: false}"


def check(*overrides: str) -> None:
    check_whole_run(plain(load_run(DEMO, list(overrides))))


@pytest.mark.quick
@pytest.mark.parametrize("size", ["abc", "1.5", "0", "-2", ""])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_wrong_environment_of_a_launcher_is_one_sentence(name: str, size: str, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, size)
    with pytest.raises(UserError, match=rf"^{name} \({size}\) in the environment must be a positive whole number"):
        check()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimzer.lr=3", "optimzer is not a key of a run; did you mean 'optimizer'?"),
        ("optimizer.lrr=3", "optimizer.lrr is not a key of optimizer; did you mean 'lr'?"),
        ("optimizer.name=decoupled_adam", r"did you mean 'decoupled_adamw'\?"),
        ("optimizer.lr=fast", "optimizer.lr must be a number, not 'fast'"),
        ("optimizer.param_groups=[{param_str_match: norm, lrr: 1}]", "param_groups.0.lrr is not a key"),
        (
            "model.attn_config.attn_implx=torch",
            "attn_implx is not a key of .*did you mean 'attn_impl'",
        ),
        ("model.attn_config.attn_impl=flsh", "did you mean 'flash'"),
        ("model.n_layer=3", r"model.n_layer is not a key of model; did you mean 'n_layers'\?"),
        ("model.n_heads=null", "model.n_heads must be a whole number, not None"),
        ("model.attn_config.attn_pdrop=null", r"attn_pdrop \(None\) must be a probability"),
        ("model.ffn_config={ffn_type: foo}", "ffn_type: 'foo' is not one of mptglu, mptmlp"),
        ("optimizer.param_groups=[{param_str_match: norm, betas: [2, 3]}]", r"param_groups.0.betas .* two numbers"),
        ("model.n_heads=3", r"model.n_heads \(3\) must divide model.d_model \(128\)"),
        ("model.attn_config={qk_ln: true, qk_gn: true}", "^model.attn_config: qk_ln and qk_gn are alternatives"),
        (
            "model.attn_config.attn_logit_softcapping=0",
            r"attn_logit_softcapping \(0\) must be a number above 0 or null; .*attn_impl sdpa does not support it",
        ),
        ("model.attn_config={attn_logit_softcapping: 30, attn_impl: torch}", None),
        ("model.attn_config={attn_logit_softcapping: null}", None),
        ("model.expansion_ratio=2.3", r"model.expansion_ratio times d_model, .* a whole number, not 294\.4"),
        ("model={expansion_ratio: 2.3, ffn_config: {ffn_hidden_size: 64}}", None),
        ("precision=amp_fp8", r"precision \(amp_fp8\): dMoE layers compute in"),
        ("precision=bf16", r"precision: 'bf16' is not one of fp32"),
        ("fsdp_config={reshard_after_fwd: true}", "did you mean 'reshard_after_forward'"),
        (
            "fsdp_config={reshard_after_forward: auto}",
            r"^fsdp_config.reshard_after_forward \(auto\) is for a run with a",
        ),
        ("max_seq_len=1", r"max_seq_len \(1\) must be 2 or more: a token is predicted from those before it"),
        ("model.max_seq_len=128", r"max_seq_len \(256\) must not be above model.max_seq_len \(128\)"),
        (
            "eval_loader=[{name: text, drop_last: false, num_workers: 1, dataset: {max_seq_len: 512}}]",
            r"eval_loader.0.dataset.max_seq_len \(512\) must not be above model.max_seq_len \(256\)",
        ),
        (
            "eval_loader=[{name: text, drop_last: false, num_workers: 0, dataset: {}}]",
            r"eval_loader.0.prefetch_factor \(2\) needs worker processes",
        ),
        ("device_train_microbatch_size=0", "must be a number above 0 or auto"),
        ("global_train_batch_size=0", "must be 1 or more"),
        ("max_duration=400", r"max_duration \(400\) has no unit: use 400ba for batches or 400ep for epochs"),
        ("max_duration=400batches", "must be a time such as 100ba"),
        ("callbacks.speed_monitr={}", "did you mean 'speed_monitor'"),
        ("seed=4294967296", r"seed \(4294967296\) must be 0 to 4294967295"),
        (
            "eval_loader=[{label: q, name: text, dataset: {}, drop_last: false, num_workers: 1}, "
            "{label: q, name: text, dataset: {}, drop_last: false, num_workers: 1}]",
            "eval_loader: 2 have the label q, which names their losses: give each its own",
        ),
        (
            "eval_loader=[{label: q, name: text, dataset: {}, drop_last: false, num_workers: 1}, "
            "{name: text, dataset: {}, drop_last: false, num_workers: 1}]",
            "eval_loader.1.label is missing",
        ),
        ("eval_subset_num_batches=0", r"eval_subset_num_batches \(0\) evaluates nothing: use -1 for all"),
        ("eval_subset_num_batches=-1", None),
        ("callbacks.expert_load.intervall=1ba", "did you mean 'interval'"),
        ("callbacks.expert_load.per_layer=null", "callbacks.expert_load.per_layer must be true or false, not None"),
        ("callbacks.expert_load.file=s3://b/x", r"callbacks.expert_load.file \(s3://b/x\) must be a local path"),
        (
            "callbacks.expert_load={file: a, html: a}",
            r"callbacks.expert_load.html \(a\) would replace `file`: give it another name",
        ),
        ("callbacks.run_report.prompt=null", "callbacks.run_report.prompt must be text, not None"),
        ("callbacks.run_report.sample_tokens=0", r"callbacks.run_report.sample_tokens \(0\) must be 1 or more"),
        ("callbacks.scheduled_gc={}", "batch_interval is missing"),
        (
            "callbacks.elastic_checkpoint.optimizer_settings=mine",
            r"optimizer_settings \(mine\) must be checkpoint or run",
        ),
        ("autoresume=true", "autoresume resumes from save_folder, which is missing: add it; elastic_checkpoint"),
        ("load_weights_only=true", r"load_weights_only \(True\) has no effect without load_path"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer.betas \(\[0.9, 1.0\]\) must be two numbers from 0 to below 1"),
        ("optimizer={name: muon, momentum: 1}", r"optimizer.momentum \(1\) must be 0 or more and below 1"),
        ("optimizer={name: muon, lr: .nan}", r"^optimizer.lr \(nan\) must be 0 or more$"),
        ("optimizer={name: muon, dtype: bf16}", r"optimizer.dtype \(bf16\) must be bfloat16, float32 or float64"),
        ("optimizer={name: muon, lr: 0, adamw_lr: 0.1}", r"optimizer.lr \(0\) with adamw_lr \(0.1\)"),
        (
            "optimizer={name: muon, param_groups: [{param_str_match: wte, adamw_lr: -1}]}",
            r"optimizer.param_groups.0.adamw_lr \(-1\) must be 0 or more",
        ),
        ("optimizer={name: muon, adamw_lr: null, weight_decay: 0}", None),
        ("loggers={wandb: {projekt: x}}", "did you mean 'project'"),
        ("tokenizer.kwargs.padding_side=left", None),  # text is not padded
        ("train_loader.prefetch_factor=2", "needs worker processes"),
        ("train_loader.dataset.locale=x", "did you mean 'local'"),
        ("eval_loader=[{name: text, dataset: {}, drop_last: false, num_workers: 1, x: 1}]", "eval_loader.0.x"),
        ("code_paths=[x.py]", None),
        ("model.moe.activation=SwigLU", r"model.moe.activation: .* did you mean 'swiglu'"),
        (
            "model.moe.gate={bias_step: 0.1}",
            r"^model.moe.gate.bias_step \(0.1\) has no effect without gate.bias_balance",
        ),
        ("model.moe.layers=[4]", r"model.moe.layers \(\[4\]\): the model has 4, so use 0 to 3"),
        (
            "model.moe.mesh={expert: 3}",
            r"^model.moe.mesh.expert \(3\) must divide num_experts \(8\): use [^:]*$",
        ),
        ("algorithms.gated_linear_units={}", "replaces the FFN of BERT models only"),
        ("callbacks.loss_perp_v_len={compute_batch_interval: 1, log_batch_interval: 1}", "add loggers.mlflow"),
        ("optimizer={name: clip_lion}", r"optimizer.name \(clip_lion\) .*: use decoupled_lionw"),
        ("optimizer={name: adalr_lion}", r"optimizer.name \(adalr_lion\) .*: use decoupled_lionw"),
        ("dist_timeout=-1", r"dist_timeout \(-1\) must be a number above 0"),
        ("dist_timeout=1e30", r"dist_timeout \(1e\+30\) must be a number above 0 and at most 1e9"),
        ("python_log_level=LOUD", r"python_log_level \(LOUD\) must be DEBUG, INFO, WARNING, ERROR or CRITICAL"),
        ("python_log_level=Warn", None),
        ("optimizer.disable_grad=[.]", r"disable_grad \(.\) matches every parameter"),
        ("compile_config={}", r"compile_config compiles the whole model.*set mesh\.compile: blocks"),
    ],
)
def test_what_is_wrong_with_a_run_is_named(override: str, sentence: str | None) -> None:
    if sentence is None:
        return check(override)
    with pytest.raises(ValueError, match=sentence):
        check(override)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("", r"^model.moe.mesh.shard \(3\) must divide d_model \(128\), the rows of experts' matrices$"),
        ("model.d_model=192", r"mesh.shard \(3\) must divide expert_hidden_size \(256\)"),
    ],
)
def test_a_mesh_that_does_not_cut_experts_evenly_is_named_before_the_start(keys: str, sentence: str) -> None:
    placed = ["fsdp_config={}", "global_train_batch_size=6", "model.moe.mesh={expert: 2, shard: 3}", *keys.split()]
    with pytest.raises(ValueError, match=sentence):
        check_whole_run(plain(load_run(DEMO, placed)), (6, 6))
    placed[2] = "model.moe.mesh={expert: 1, shard: 6}"  # which shards the dimension of experts
    check_whole_run(plain(load_run(DEMO, placed)), (6, 6))


def mistakes_of(*overrides: str) -> list[str]:
    with pytest.raises(MistakesError) as caught:
        check(*overrides)
    return [sentence.split(" ")[0] for sentence in caught.value.sentences]


def test_all_mistakes_in_keys_types_and_experts_are_named_at_once() -> None:
    assert mistakes_of("optimzer.lr=3", "model.n_heads=x", "max_seq_len=long", "model.moe={top_k: 99, drop: x}") == [
        "model.moe.top_k",
        "model.moe.drop:",
        "optimzer",
        "max_seq_len",
        "model.n_heads",
        "model.max_seq_len",
    ]


def test_all_mistakes_in_values_are_named_at_once() -> None:
    wrong = ["optimizer.lr=-1", "max_duration=9", "train_loader.num_workers=-1", "model.moe.gate.name=swich"]
    assert mistakes_of(*wrong, "callbacks.elastic_checkpoint.keep=0", "model.moe.init=upcycle") == [
        "callbacks.elastic_checkpoint.keep",
        "model.moe.gate.name:",
        "model.moe.init",
        "optimizer.lr",
        "train_loader.num_workers",
        "max_duration",
    ]


def test_a_mesh_that_does_not_fit_is_named_beside_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", DEMO, "--gpus", "3", "optimizer.lr=-1", "max_duration=3"])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and all(key in errors for key in ("optimizer.lr", "max_duration", "GPUs (3)"))


@pytest.mark.parametrize("loss", ["auto", "fused_linear_crossentropy", "torch_crossentropy"])
def test_every_loss_of_the_model_is_known(loss: str) -> None:
    check(f"model.loss_fn={loss}")


def test_the_experts_of_a_model_in_a_local_folder_are_checked(tmp_path: Path) -> None:
    model = f"model={{name: hf_causal_lm, pretrained_model_name_or_path: {tmp_path}}}"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 4}))
    check(model, "algorithms.dmoe={num_experts: 4, top_k: 2}")
    with pytest.raises(ValueError, match=r"num_experts \(8\): the model in .* has MoE blocks with 4: use 4"):
        check(model, "algorithms.dmoe={num_experts: 8}")
    with pytest.raises(ValueError, match=r"init \(upcycle\): the model in .* has MoE blocks.*: remove init"):
        check(model, "algorithms.dmoe={num_experts: 4, init: upcycle}")
    dbrx = {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}
    (tmp_path / "config.json").write_text(json.dumps(dbrx))
    with pytest.raises(ValueError, match=r"top_k \(2\): .* with 4: use 4"):
        check(model, "algorithms.dmoe={num_experts: 16}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check(model, "algorithms.dmoe={num_experts: 8, init: upcycle}")


def test_layers_and_widths_are_those_of_a_model_in_a_local_folder(tmp_path: Path) -> None:
    model = f"model={{name: hf_causal_lm, pretrained_model_name_or_path: {tmp_path}}}"
    config = {"model_type": "llama", "num_hidden_layers": 3, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(model, "algorithms.dmoe={num_experts: 8, expert_hidden_size: 48, layers: [2]}")
    check(model, "model.pretrained=false", "algorithms.dmoe={num_experts: 8, expert_hidden_size: 50}")
    for keys, sentence in {
        "layers: [3]": r"algorithms.dmoe.layers \(\[3\]\): the model has 3, so use 0 to 2",
        "layers: {every: 4}": r"algorithms.dmoe.layers .* selects none of the model's 3 layers",
        "expert_hidden_size: 50": r"algorithms.dmoe.expert_hidden_size \(50\) must be that of the model's FFN \(96\)",
        "init: upcycle, expert_hidden_size: 32": r"algorithms.dmoe.num_experts \(8\) must be a multiple of 3",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            check(model, f"algorithms.dmoe={{num_experts: 8, {keys}}}")


def test_padding_on_the_left_is_refused_where_an_mpt_trains_with_it() -> None:
    left = ["tokenizer.kwargs.padding_side=left", "train_loader={name: finetuning, dataset: {}, num_workers: 1}"]
    with pytest.raises(ValueError, match=r"padding_side \(left\): an MPT trains with padding on the right only"):
        check(*left)
    check(*left, "model={name: hf_causal_lm, pretrained_model_name_or_path: x}", "algorithms={dmoe: {num_experts: 8}}")


def test_keys_of_a_start_have_an_effect_where_a_run_resumes_by_itself() -> None:
    check("load_weights_only=true", "autoresume=true", "save_folder=runs/composer")
    with pytest.raises(ValueError, match="load_weights_only"):
        check("load_weights_only=true", "autoresume=false")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("{}/run", "{}/run/"),
        ("{}/run", "file://{}/run"),
        ("{}/run/../run", "{}/run"),
        ("s3://bucket/run", "s3://bucket/run/"),
    ],
)
def test_two_kinds_of_checkpoints_in_one_folder_are_refused(ours: str, theirs: str, tmp_path: Path) -> None:
    ours, theirs = (folder.format(tmp_path) for folder in (ours, theirs))
    with pytest.raises(ValueError, match=r"save_folder and callbacks.elastic_checkpoint.folder are both .*/run: give"):
        check(f"callbacks.elastic_checkpoint.folder={ours}", f"save_folder={theirs}")
    check(f"callbacks.elastic_checkpoint.folder={ours}", f"save_folder={theirs.rstrip('/')}/other")


def test_a_monolithic_checkpoint_is_refused_with_fsdp2() -> None:
    saver = "callbacks.mono_checkpoint_saver={save_folder: x, batch_interval: 1}"
    check(saver)
    with pytest.raises(ValueError, match=r"callbacks.mono_checkpoint_saver does not support FSDP2"):
        check(saver, "fsdp_config={}")


def test_auto_is_offered_where_the_mesh_can_be_auto() -> None:
    told = "mesh.shard (2) does not fit the number of GPUs (3): override mesh.shard=3, or mesh=auto, with which"
    (dense,) = whole_paths({"algorithms": {"dmoe_mesh": {"shard": 2}}}, [told])
    assert dense.endswith("(3): override algorithms.dmoe_mesh.shard=3")
    (experts,) = whole_paths({"model": {"moe": {"mesh": {"shard": 2}}}}, [told])
    assert experts.endswith("override model.moe.mesh.shard=3, or model.moe.mesh=auto, with which")


def test_a_tokenizer_or_facts_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not missing_files({"tokenizer": {"name": "data/tokenizer"}})  # a name of the hub
    report = {"run_report": {"facts": "none.json"}}
    (said,) = missing_files({"callbacks": report})
    assert said.startswith("callbacks.run_report.facts (none.json): there is no such file")
    (tmp_path / "data").mkdir()
    (said,) = missing_files({"callbacks": report, "tokenizer": {"name": "/nowhere"}})  # not a second for the same data
    for name in ("data/tokenizer", "./tokenizer", "/nowhere"):
        assert missing_files({"tokenizer": {"name": name}})[0].startswith(f"tokenizer.name ({name}): there is no such")


@pytest.mark.parametrize("column", ["bytes", "ndarray:uint16", "ndarray:int32", "ndarray:int64:300"])
def test_samples_shorter_than_the_sequence_are_a_sentence(column: str, tmp_path: Path) -> None:
    import numpy as np
    from streaming import MDSWriter

    tokens = np.zeros(300, dtype=column.split(":")[1] if ":" in column else "int64")
    with MDSWriter(out=str(tmp_path / "train"), columns={"id": "str", "tokens": column}) as writer:
        writer.write({"id": "a", "tokens": tokens.tobytes() if column == "bytes" else tokens})
    loader = {"drop_last": False, "dataset": {"local": str(tmp_path), "split": "train", "max_seq_len": 301}}
    (sentence,) = file_mistakes({"train_loader": loader})
    assert "max_seq_len (301): the samples in" in sentence and "have 300 tokens; set max_seq_len to 300" in sentence
    loader["dataset"]["max_seq_len"] = 300
    assert not file_mistakes({"train_loader": loader})


def test_code_that_is_not_there_is_named() -> None:
    streams = {"a": {"local": "/nowhere/a"}, "b": {"local": "/nowhere/b", "remote": "s3://bucket/b"}}
    run = {"train_loader": {"dataset": {"streams": streams}}, "eval_loader": [{"dataset": {"local": "/nowhere/c"}}]}
    first, second = missing_files(run)
    assert first.startswith("train_loader.dataset.streams.a.local (/nowhere/a): there is no such folder")
    assert second.startswith("eval_loader.0.dataset.local (/nowhere/c): there is no such folder")
    assert missing_files({"code_paths": ["/nowhere/mine.py"]}) == [
        "code_paths (/nowhere/mine.py): there is no such file; correct the path"
    ]


def test_tasks_that_are_not_there_are_named() -> None:
    assert missing_files({"icl_tasks": "/nowhere/tasks.yaml"}) == [
        "icl_tasks (/nowhere/tasks.yaml): there is no such file; correct the path"
    ]
    tasks = [{"dataset_uri": "s3://bucket/tasks.jsonl"}, {"dataset_uri": "/nowhere/tasks.jsonl"}]
    (said,) = missing_files({"icl_tasks": tasks})
    assert said.startswith("icl_tasks.1.dataset_uri (/nowhere/tasks.jsonl): there is no such file")


def test_upcycling_without_trained_weights_is_refused() -> None:
    check(HF, "algorithms.dmoe={num_experts: 4}")
    with pytest.raises(ValueError, match=r"model.pretrained is false, so there are no trained weights to copy"):
        check(HF, "algorithms.dmoe={num_experts: 4, init: upcycle}")


def test_fsdp1_is_refused_with_an_empty_configuration_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    check()
    with pytest.raises(ValueError, match=r"FSDP_VERSION \(1\): dMoE layers need FSDP2"):
        check("fsdp_config={}")


def test_names_that_other_packages_register_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others = SimpleNamespace(entry_points=[SimpleNamespace(name="theirs", group="llmfoundry_callbacks")])
    monkeypatch.setattr(foundry_keys, "distributions", lambda: [others])
    foundry_keys.installed_names.cache_clear()
    foundry_keys.known_names.cache_clear()
    try:
        check("callbacks.theirs={any: key}")
        with pytest.raises(ValueError, match=r"callbacks.thiers is not registered; did you mean 'theirs'"):
            check("callbacks.thiers={}")
    finally:
        foundry_keys.installed_names.cache_clear()
        foundry_keys.known_names.cache_clear()


def test_a_runs_own_code_may_register_any_name() -> None:
    with pytest.raises(ValueError, match=r"train_loader.name: mine is not registered"):
        check("train_loader={name: mine, key: 1}")
    check("train_loader={name: mine, key: 1}", "code_paths=[mine.py]")


def test_the_table_of_keys_is_that_of_the_installed_packages() -> None:
    """Where it is not: python scripts/make_run_keys.py."""
    assert json.loads(make_run_keys.TABLE.read_text()) == json.loads(json.dumps(make_run_keys.build()))


def test_checking_imports_no_trainer() -> None:
    heavy = ("torch", "numpy", "composer", "llmfoundry", "transformers", "boto3", "triton")
    code = (
        "import sys; from foundry_moe.cli import main\n"
        f"try: main(['check', {DEMO!r}])\n"
        f"except SystemExit as end: print(end.code, [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_edited_runs_are_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    """The short form of `python -m tests.chaos.fuzz_yamls`."""
    counts, failures = run_cases(300, seed=1, folder=tmp_path)
    assert not failures, failures[0]
    assert counts["right: accepted"] > 30 and counts["wrong: refused"] > 60


def test_a_precision_that_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    size = {"device_train_microbatch_size": 2}
    check_device({"precision": "fp32", **size})
    with pytest.raises(ValueError, match=r"precision \(amp_bf16\) needs a GPU, and this machine has none"):
        check_device(size)
    for auto in ({}, {"device_train_microbatch_size": "auto"}):
        with pytest.raises(ValueError, match=r"device_train_microbatch_size \(auto\) needs a GPU, and this machine"):
            check_device({"precision": "fp32", **auto})
    monkeypatch.setattr("foundry_moe.launch.run_config._GPU_FILES", ("/nowhere",))
    with pytest.raises(SystemExit) as ended:
        main(["check", str(ROOT / "yamls/pretrain/1gpu.yaml")])
    assert ended.value.code == 0 and "note: precision (amp_bf16) needs a GPU" in capsys.readouterr().out


@pytest.mark.quick
def test_a_limit_of_open_files_that_gloo_would_exceed_is_a_note(monkeypatch) -> None:
    monkeypatch.setattr(check_command.resource, "getrlimit", lambda kind: (1024, 4096))
    assert check_command.descriptor_notes(512) == []
    (note,) = check_command.descriptor_notes(3072)
    assert "a process of 3072 opens up to 6150 files; the limit here is 4096" in note


@pytest.mark.parametrize(("size", "accepted"), [(5, True), (4, False)])
@pytest.mark.parametrize("model", ["folder", "overridden"])
def test_a_tokenizer_larger_than_the_vocabulary_is_a_sentence(model: str, size: int, accepted: bool, tmp_path: Path):
    words = {
        "model": {"vocab": {"a": 0, "b": 1, "<s>": 2}},
        "added_tokens": [{"content": "<s>", "id": 2}, {"content": "y", "id": 4}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size if model == "folder" else 99}))
    keys = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(tmp_path)}
    if model == "overridden":
        keys |= {"config_overrides": {"vocab_size": size}}
    tokenizer = {"name": str(tmp_path)}
    found = file_mistakes({"model": keys, "tokenizer": tokenizer})
    assert len(found) == (0 if accepted else 1)
    if found:
        assert f"has token ids up to 4, and the model has embeddings for {size} tokens" in found[0]
        mpt = {"name": "mpt_causal_lm", "vocab_size": size}
        assert "set model.vocab_size to 5 or more" in file_mistakes({"model": mpt, "tokenizer": tokenizer})[0]
        assert not file_mistakes({"model": {**keys, "allow_embedding_resizing": True}, "tokenizer": tokenizer})


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 2), (None, 0)])
def test_rows_are_not_added_to_weights_that_are_not_there(size: int | None, count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1}))
    if size:  # without the file the number of tokens is not known
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(size)}}}))
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(tmp_path), "allow_embedding_resizing": True}
    run = {"tokenizer": {"name": str(tmp_path)}, "callbacks": {"elastic_checkpoint": {"save_frozen": True}}}
    assert not file_mistakes({**run, "model": {**model, "init_device": "cpu"}})
    run["callbacks"] = {"elastic_checkpoint": {"save_frozen": False}}
    found = file_mistakes({**run, "model": {**model, "init_device": "meta"}})
    assert len(found) == count
    if count:
        assert found[0].startswith("model.init_device (meta)") and found[0].endswith("use init_device: cpu")
        assert found[1].endswith("model.allow_embedding_resizing draws rows: use save_frozen: true")


def test_rows_are_counted_before_a_model_of_the_hub_is_built(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, file: asked.append(file) or str(tmp_path / file))
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "nobody/model", "allow_embedding_resizing": True}
    run = {"model": model, "tokenizer": {"name": "nobody/tokenizer"}}
    assert not file_mistakes(run) and not asked  # rows may be added
    (found,) = file_mistakes({**run, "model": {**model, "init_device": "meta"}})
    assert found.startswith("model.init_device (meta)") and asked == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(("batch", "drop_last", "accepted"), [(7, True, True), (8, True, False), (8, False, True)])
def test_training_data_of_less_than_a_batch_is_a_sentence(batch: int, drop_last: bool, accepted: bool, tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/index.json").write_text(json.dumps({"shards": [{"samples": 3}, {"samples": 4}]}))
    data = {"local": str(tmp_path), "split": "train"}
    for dataset in (data, {"streams": {"a": data}}):
        loader = {"drop_last": drop_last, "dataset": dataset}
        found = file_mistakes({"train_loader": loader, "global_train_batch_size": batch})
        assert len(found) == (0 if accepted else 1)
        assert accepted or "has 7 samples, fewer than global_train_batch_size (8)" in found[0]


def test_the_experts_of_a_run_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[type] = []
    original = run_config.from_mapping

    def counted(cls: Any, *rest: Any) -> Any:
        read.append(cls)
        return original(cls, *rest)

    monkeypatch.setattr(run_config, "from_mapping", counted)
    check("model.moe.mesh={expert: 2}")
    assert read.count(MoEConfig) == 1
