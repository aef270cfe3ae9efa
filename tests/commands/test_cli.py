"""The command `foundry-moe`: its parts are there, and a mistake is one line."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from foundry_moe import __version__
from foundry_moe.cli import build_parser, main
from foundry_moe.commands.plan.microbatch import choose_microbatch
from foundry_moe.commands.plan.planner import Machine
from foundry_moe.launch.run_config import load_run, plain

BIN = Path(sys.executable).parent
FOLDER = Path(__file__).parents[2] / "yamls"
YAMLS = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.name != "eval")  # that is no training run


def outcome(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_the_installed_command_answers():
    done = subprocess.run([BIN / "foundry-moe", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"foundry_moe {__version__}"


@pytest.mark.quick
@pytest.mark.parametrize("command", ["check", "train", "verify", "plan", "loads", "checkpoints"])
def test_each_command_explains_itself(capsys, command):
    code, out, _ = outcome(capsys, command, "--help")
    assert code == 0 and f"foundry-moe {command}" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["chekpoints"], "foundry-moe: error: 'chekpoints' is not a command; did you mean 'checkpoints'?"),
        (["checkpoints", "lst", "x"], "foundry-moe checkpoints: error: 'lst' is not a command; did you mean 'ls'?"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest(capsys, words, sentence):
    code, _, error = outcome(capsys, *words)
    assert code == 2 and error.endswith(f"{sentence}\n")


@pytest.mark.parametrize("words", [["check"], ["plan", "--gpus", "2"], ["loads"], ["checkpoints", "ls"]])
@pytest.mark.parametrize("length", [300, 5000])
def test_an_overlong_name_is_one_line(capsys, words, length):
    code, _, error = outcome(capsys, *words, "x" * length)
    assert code in (1, 2) and error.startswith("error: ") and error.count("\n") == 1


def test_every_option_has_a_help_text_and_every_command_an_example():
    def parsers(parser):
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    yield from parsers(below)

    for parser in parsers(build_parser()):
        last = not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
        assert not last or (parser.epilog or "").startswith(f"example: {parser.prog}"), parser.prog
        for action in parser._actions:
            assert action.help or not action.option_strings, (parser.prog, action.option_strings)


@pytest.mark.quick
def test_a_mistake_in_a_run_is_one_line(capsys, tmp_path):
    code, _, error = outcome(capsys, "plan", str(tmp_path / "none.yaml"), "--gpus", "8")
    assert code != 0 and "none.yaml" in error and error.count("\n") == 1


def test_a_folder_in_place_of_a_run_is_named_as_one(capsys, tmp_path):
    code, _, printed = outcome(capsys, "check", str(tmp_path))
    assert (code, printed) == (2, f"error: {tmp_path} is a folder: name a run's YAML in it\n")


def test_a_plan_checks_a_run_as_training_does(capsys):
    run = str(Path(__file__).parents[2] / "yamls/demo/cpu.yaml")
    code, _, error = outcome(capsys, "plan", run, "model.moe.gate.name=swich", "--gpus", "1")
    assert code == 2 and "there is no gate 'swich'; did you mean 'switch'?" in error


def test_train_checks_the_run_for_its_processes_before_it_starts_them(capsys, tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")  # restored afterwards
    for name in ("tokenizer", "train", "val"):
        (tmp_path / name).mkdir()
    (tmp_path / "facts.json").touch()
    run = [str(FOLDER / "demo/cpu.yaml"), f"variables.data={tmp_path}", "variables.run=runs/none"]
    code, _, error = outcome(capsys, "train", *run, "-n", "3")
    assert (code, error) == (2, "error: global_train_batch_size (4) must be a multiple of the number of GPUs (3)\n")


def test_overrides_stand_anywhere_among_a_plans_options(capsys):
    run = str(Path(__file__).parents[2] / "yamls/demo/cpu.yaml")
    wanted = outcome(capsys, "plan", run, "model.moe.mesh={expert: 2}", "model.n_layers=2", "--gpus", "2")
    assert wanted[0] == 0 and "2 of 2 layers" in wanted[1] and "expert 2" in wanted[1]
    for arguments in (
        ["plan", run, "--gpus", "2", "model.moe.mesh={expert: 2}", "model.n_layers=2"],
        ["plan", "--gpus", "2", run, "model.moe.mesh={expert: 2}", "model.n_layers=2"],
        ["plan", run, "model.moe.mesh={expert: 2}", "--gpus", "2", "model.n_layers=2", "--gpus-per-node", "8"],
    ):
        assert outcome(capsys, *arguments) == wanted
    code, _, error = outcome(capsys, "plan", run, "--gpus", "2", "a=b", "--nope")
    assert code == 2 and "--nope" in error


def test_a_plan_of_a_tiny_run_warns_of_no_slowness(capsys):
    run = str(Path(__file__).parents[2] / "yamls/demo/cpu.yaml")
    keys = ("model.moe.mesh={expert: 2}", "global_train_batch_size=16")
    code, out, _ = outcome(capsys, "plan", run, *keys, "--gpus", "8", "--gpus-per-node", "2")
    assert code == 0 and "messages" in out and "0.00 s" not in out


def test_a_plan_of_a_hugging_face_model_that_is_not_here_is_one_line(capsys):
    run = str(Path(__file__).parents[2] / "yamls/demo/cpu.yaml")
    model = "model={name: hf_causal_lm, pretrained_model_name_or_path: some/model}"
    code, _, error = outcome(capsys, "plan", run, model, "algorithms.dmoe.num_experts=4", "--gpus", "2")
    assert code == 2 and "(some/model): its configuration cannot be read" in error and error.count("\n") == 1


@pytest.mark.quick
def test_a_check_says_what_a_run_is_or_one_line(capsys, tmp_path, monkeypatch):
    run, data = str(Path(__file__).parents[2] / "yamls/demo/cpu.yaml"), f"variables.data={tmp_path}"
    for name in ("tokenizer", "train", "val"):
        (tmp_path / name).mkdir()
    (tmp_path / "facts.json").touch()
    code, out, error = outcome(capsys, "check", run, data)
    assert (code, error) == (0, "")
    assert out.startswith("ok: dmoe_causal_lm, 4 layers of width 128, 8 experts, top 2") and out.count("\n") == 1
    code, _, error = outcome(capsys, "check", run, data, "model.moe.top_k=9")
    assert code == 2 and error.startswith("error: model.moe.top_k (9)") and error.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert "mesh.expert (4)" in outcome(capsys, "check", run, data, "model.moe.mesh.expert=4")[2]


def test_data_that_is_not_there_is_a_note_with_what_to_do(capsys, tmp_path):
    run = str(Path(__file__).parents[2] / "yamls/demo/cpu.yaml")
    code, out, _ = outcome(capsys, "check", run, f"variables.data={tmp_path / 'none'}")
    assert code == 0 and out.count("\nnote: ") == 3 and "python examples/demo_data.py" in out
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").touch()
    out = outcome(capsys, "check", run, f"variables.data={tmp_path}")[1]
    assert f"note: eval_loader.dataset.split (val): {tmp_path} has no such folder; it has train\n" in out


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.stem)
def test_every_shipped_run_is_right(capsys, path):
    code, out, error = outcome(capsys, "check", str(path))
    assert (code, error) == (0, "") and out.startswith("ok: ")
    assert "run_report" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "12"], "12 GPUs do not fill nodes of 8 GPUs"),
        (["model.moe.mesh={expert: 3}"], "mesh.expert (3) must divide num_experts (16): use 1, 2, 4, 8 or 16"),
        (["--gpus", "64", "model.moe.mesh.spares=false", "global_train_batch_size=100"], "must be a multiple of"),
        (
            ["--gpus", "8", "model.moe.mesh={expert: 8, shard: 2, spares: false}"],
            "= 16 does not fit the number",
        ),
        (["--gpus", "512", "model.moe.mesh.expert=3"], "model.moe.mesh.expert (3) must divide num_experts (16)"),
        (["--gpus", "64", "fsdp_config=null"], "add `fsdp_config: {}`"),
    ],
)
def test_a_mesh_that_does_not_fit_the_gpus_is_refused(capsys, arguments, sentence):
    run = str(Path(__file__).parents[2] / "yamls/cluster/64x8gpu.yaml")
    for mesh in ((), ("model.moe.mesh=auto",)):
        assert outcome(capsys, "check", run, "--gpus", "512", *mesh)[0] == 0
    code, _, error = outcome(capsys, "check", run, *arguments)
    assert code == 2 and sentence in error and error.count("\n") == 1


def test_a_microbatch_that_the_start_does_not_choose_is_refused(capsys):
    dense = "model={name: mpt_causal_lm, d_model: 32, n_heads: 4, n_layers: 2, max_seq_len: 256, vocab_size: 4096}"
    words = ["check", str(FOLDER / "demo/cpu.yaml"), dense, "device_train_microbatch_size=auto", "--gpus"]
    assert outcome(capsys, *words, "1")[0] == 0  # Composer's own
    with pytest.raises(ValueError, match="the run has no experts") as at_start:
        choose_microbatch(plain(load_run(words[1], words[2:4])), Machine(gpus=2, gpus_per_node=2, gpu_bytes=1e10))
    assert outcome(capsys, *words, "2")[::2] == (2, f"error: {at_start.value}\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mesh", "1,1,3"], "mesh.expert (3) must divide num_experts (8): use 1"),
        (["--mesh", "1,1,64", "--device", "cuda"], "--mesh 1,1,64 needs 64 GPUs"),
    ],
)
def test_a_mesh_that_cannot_be_verified_is_one_line(capsys, arguments, sentence):
    code, _, error = outcome(capsys, "verify", *arguments)
    assert code == 2 and sentence in error and error.count("\n") == 1


def test_a_plan_has_the_memory_of_its_chip(capsys):
    words = ["plan", str(FOLDER / "bench/olmoe_1b_7b.yaml"), "--gpus", "4"]
    l40s = ["--chip", "l40s", "--constants", str(FOLDER.parent / "foundry_moe/commands/plan/constants_h200.json")]
    code, out, _ = outcome(capsys, *words, *l40s)
    assert code == 1 and "GiB of 44" in out
    assert outcome(capsys, *words, "--chip", "h100")[0] == 0
    assert outcome(capsys, *words, *l40s, "--gpu-memory-gib", "80")[0] == 0
    alone = ["global_train_batch_size=4", "model.moe.mesh.expert=1", "--gpus", "1", "--chip"]
    assert outcome(capsys, *words[:2], *alone, "h100")[0] == 1 and outcome(capsys, *words[:2], *alone, "h200")[0] == 0


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf"])
def test_a_plan_of_an_impossible_machine_is_refused(capsys, value):
    code, _, printed = outcome(capsys, "plan", "run.yaml", "--gpus", "8", f"--gpu-memory-gib={value}")
    assert code == 2 and f"argument --gpu-memory-gib: {value} must be a finite number above 0" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["verify", "--timeout-s", "0"], "argument --timeout-s: 0 must be a finite number above 0"),
        (["export", "RUN", "OUT", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["export", "RUN", "OUT", "--file-gb", "nan"], "argument --file-gb: nan must be a finite number above 0"),
        (
            ["checkpoints", "export", "RUN", "OUT", "--file-gb", "0"],
            "argument --file-gb: 0 must be a finite number above 0",
        ),
        (["checkpoints", "show", "RUN", "--gpus", "-2"], "argument --gpus: -2 must be 1 or more"),
        (["export", "RUN", "s3://bucket/out"], "s3://bucket/out must be a path of this host"),
        (["checkpoints", "gc", "RUN", "--keep", "0"], "argument --keep: 0 must be 1 or more"),
        (["export", "RUN", "OUT"], "error: there is nothing at"),
        (["plan", str(YAMLS[0])], "the following arguments are required: --gpus"),
        (["check"], "the following arguments are required: yaml\n"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_runs(capsys, arguments, sentence):
    code, _, error = outcome(capsys, *arguments)
    assert code == 2 and sentence in error


@pytest.mark.quick
@pytest.mark.parametrize(
    ("path", "override", "sentence"),
    [
        (
            "pretrain/8gpu.yaml",
            "model.moe.num_experts=99999999999999",
            "num_experts (99999999999999) must be from 1 to 4096",
        ),
        ("pretrain/8gpu.yaml", "callbacks.expert_load.interval=0ba", "interval ('0ba') must be above 0"),
        ("bench/qwen3_30b_a3b.yaml", "model.attn_config.fused_qkv=true", "set model.attn_config.fused_qkv: false"),
        ("bench/qwen3_30b_a3b.yaml", "model.attn_config.rope_impl=dail", "set model.attn_config.rope_impl: hf"),
        ("bench/qwen3_30b_a3b.yaml", "model.head_dim=0", "model.head_dim (0) must be"),
        ("eval/exported.yaml", "seed=1", "is a run of LLM Foundry's evaluation (models): use `llmfoundry eval`"),
    ],
)
def test_what_no_run_can_have_is_one_line(capsys, path, override, sentence):
    code, _, error = outcome(capsys, "check", str(FOLDER / path), override)
    assert code == 2 and sentence in error and error.count("\n") == 1


@pytest.mark.quick
def test_a_file_of_one_word_is_no_run(capsys, tmp_path):
    (tmp_path / "word.yaml").write_text("hello\n")
    code, _, error = outcome(capsys, "check", str(tmp_path / "word.yaml"))
    assert code == 2 and error.endswith("word.yaml must be a mapping of keys to values at its top level\n")


@pytest.mark.quick
def test_importing_the_command_needs_no_trainer():
    """`--help` on a login node answers in seconds."""
    heavy = ("torch", "numpy", "composer", "llmfoundry", "transformers", "boto3", "triton")
    code = f"import sys, foundry_moe.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train_loader.dataset.packing_ration=3", "train_loader.dataset.packing_ration is not a key of"),
        ("algorithms.dmoe.freeze=[gte]", "freeze: 'gte' is not one of gate; did you mean 'gate'?"),
        ("algorithms.dmoe.gate={name: hash}", "freeze (gate): gate hash has no weights"),
        (
            "callbacks.expert_load.file=null",
            "expert_load.html (runs/instructions/expert_load.html) is a page of `file`",
        ),
        ("callbacks.expert_load=null", None),
    ],
)
def test_a_mistake_in_a_fine_tuning_run_is_one_line(capsys, override, sentence):
    run = str(FOLDER / "finetune" / "instructions.yaml")
    code, out, error = outcome(capsys, "check", run, override, "algorithms.dmoe.top_k=1")
    if sentence is None:
        assert code == 0 and "note: train_loader.dataset.hf_kwargs.data_files (data/instructions/train.jsonl)" in out
    else:
        assert code == 2 and sentence in error and error.count("\n") == 1
