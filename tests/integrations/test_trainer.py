"""`ParallelTrainer` on CPU processes: the program of docs/how-to/transformers_parallel.md, and TRL's SFTTrainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from foundry_moe.integrations import transformers as integration
from foundry_moe.schema import UserError

if find_spec("accelerate") is None or find_spec("trl") is None:
    pytest.skip("needs accelerate and trl", allow_module_level=True)
ROOT = Path(__file__).parents[2]


def command(processes: int, folder: Path, *tasks: str) -> dict:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return {
        "args": [*launcher, "tests/integrations/trainer_worker.py", str(folder), *tasks], "cwd": ROOT, "text": True,
        "env": os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
    }  # fmt: skip


def launch(processes: int, folder: Path, *tasks: str) -> None:
    done = subprocess.run(**command(processes, folder, *tasks), capture_output=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def interrupt(folder: Path, step: int) -> str:
    """Sends SIGINT to torchrun after a step, as Ctrl-C does. All that it printed."""
    running = subprocess.Popen(**command(2, folder, "interrupted"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, steps = [], 0
    for line in running.stdout:
        printed.append(line)
        steps += "'grad_norm'" in line
        if steps == step:
            running.send_signal(signal.SIGINT)
            steps += 100
    running.wait(60)
    return "".join(printed)


@pytest.fixture
def folder(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, bos_token_id=None,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.5})
    model.save_pretrained(tmp_path / "balanced model")
    return tmp_path


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trainer_of(folder: Path, samples: list, **settings):
    """Of this process, without `parallelize`."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    arguments = TrainingArguments(
        str(folder / "out"), report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=1, **settings
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return integration.ParallelTrainer(model, arguments, train_dataset=samples, eval_dataset=samples[:1])


class Samples(list):
    """Six samples; `action` is called when the fourth is read."""

    def __init__(self, action) -> None:
        super().__init__({"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(6))
        self.action, self.count = action, 0

    def __getitem__(self, index):
        self.count += not isinstance(index, slice)
        if self.count == 4:
            self.action()
        return super().__getitem__(index)


def test_smoothed_labels_are_those_of_the_next_token(folder, one_rank):
    """FSDP2 changes the name of the model's class, by which Trainer knows that it has to shift them."""
    trainer = trainer_of(folder, Samples(lambda: None), label_smoothing_factor=0.1)
    ids = torch.arange(8)[None]
    expected = trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": ids.clone()})
    integration.parallelize(trainer.model, {"expert": 1, "compile": "blocks"}, device="cpu")
    found = trainer.compute_loss(trainer.model.eval(), {"input_ids": ids, "labels": ids.clone()})
    torch.testing.assert_close(found, expected)


def test_two_processes_train_save_and_resume_as_one(folder):
    """In one test, since processes import for seconds."""
    printed = interrupt(folder, step=3)
    (checkpoint,) = (path.name for path in (folder / "interrupted").glob("checkpoint-*"))
    assert checkpoint in [f"checkpoint-{step}" for step in range(3, 10)], printed[-4000:]
    (folder / "interrupted.json").unlink()

    launch(2, folder, "two", "interrupted", "SFT", "balanced")
    for name in ("resumed on two", "resumed on one"):
        shutil.copytree(folder / "two", folder / name)
        (folder / name / "checkpoint-20/trainer_state.json").unlink()  # as if killed before: resumed from 10
    launch(2, folder, "resumed on two")
    launch(1, folder, "resumed on one", "one process", "one process SFT", "one process balanced")

    logs = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    parameters = {name: torch.load(folder / f"{name}.pt") for name in logs}
    assert all(log["step"] == 20 and len(log["loss"]) == 20 for log in logs.values())
    pairs = {"two": "one process", "resumed on one": "one process"}
    pairs |= {name: f"one process {name}" for name in ("SFT", "balanced")}
    for name, one in pairs.items():
        assert logs[one]["loss"][-1] < logs[one]["loss"][0] and min(logs[one]["grad_norm"]) > 0.5  # all steps clip
        for key in ("loss", "grad_norm", "eval_loss"):
            assert logs[name][key] == pytest.approx(logs[one][key], rel=1e-5), (name, key)  # sums in another order
    for name in ("two", "resumed on one"):  # after SFT AdamW has amplified the noise of <eos>, whose gradient is zero
        for parameter, value in parameters["one process"].items():
            torch.testing.assert_close(parameters[name][parameter], value, rtol=0, atol=1e-5)
    for name in ("interrupted", "resumed on two"):  # on as many processes: the same numbers
        assert logs[name] == logs["two"], name
        assert all(torch.equal(value, parameters["two"][key]) for key, value in parameters[name].items()), name

    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder / "two/trained").state_dict()
    assert all(torch.equal(trained[key], value) for key, value in parameters["two"].items())


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1},
        {"push_to_hub": True},
        {"fsdp": True},
        {"bf16_full_eval": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_would_fail_later_are_refused(folder, monkeypatch, arguments):
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", lambda self: pytest.fail("has written to the hub"))
    with pytest.raises(UserError, match=f"{next(iter(arguments))}: not supported by ParallelTrainer; omit"):
        trainer_of(folder, [{}], **arguments)


def test_checkpoints_that_cannot_be_resumed_are_refused(folder, one_rank):
    trainer = trainer_of(folder, Samples(lambda: None), max_steps=1)
    trainer.train()
    state = folder / "out/checkpoint-1/trainer_state.json"
    state.rename(folder / "state.json")  # as if killed before it was written
    with pytest.raises(UserError, match=r"resume_from_checkpoint \(.*checkpoint-1\) is not complete: give an earlier"):
        trainer.train(resume_from_checkpoint=True)
    (folder / "state.json").rename(state)
    shutil.rmtree(folder / "out/checkpoint-1/state")
    with pytest.raises(UserError, match=r"checkpoint-1.* has no state to resume: saved with save_only_model, or not"):
        trainer.train(resume_from_checkpoint=True)


def test_arguments_serve_several_trainers(folder):
    first = trainer_of(folder, [{}], gradient_accumulation_steps=2)
    integration.ParallelTrainer(first.model, first.args)
    assert first.args.accelerator_config.gradient_accumulation_kwargs is None
    assert first.accelerator.gradient_state.plugin_kwargs["sync_each_batch"]


@pytest.mark.parametrize("interval", ["steps", "epoch"])
def test_a_signal_saves_at_once_where_the_step_would_evaluate(folder, one_rank, interval):
    """Also with save_strategy="best", which saves after an evaluation that improved: here none after the first does."""
    samples = Samples(lambda: os.kill(os.getpid(), signal.SIGTERM))
    settings = {"metric_for_best_model": "loss", "greater_is_better": True, "save_strategy": "best"}
    if interval == "epoch":
        settings = {"save_strategy": "epoch"}
    trainer = trainer_of(folder, samples, eval_strategy=interval, eval_steps=1, logging_steps=1, **settings)
    before = signal.getsignal(signal.SIGTERM)
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) is before
    step = trainer.state.global_step
    assert 1 < step < 6 and (folder / f"out/checkpoint-{step}/trainer_state.json").exists()
    assert step not in [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_handlers_of_signals_are_restored_after_an_error(folder, one_rank):
    def fail():
        raise RuntimeError("of the data")

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    trainer = trainer_of(folder, Samples(fail), save_strategy="no")
    with pytest.raises(RuntimeError, match="of the data"):
        trainer.train()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_trains_outside_the_main_thread(folder, one_rank):
    trainer = trainer_of(folder, Samples(lambda: None), save_strategy="no", max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1


def test_a_training_after_a_stopped_one_saves_and_evaluates_its_epochs(monkeypatch):
    from foundry_moe.integrations.transformers_trainer import _ResumeAndStop

    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    trainer = SimpleNamespace(received=True, load_training_state=lambda: None)
    callback, arguments = _ResumeAndStop(trainer), SimpleNamespace(device="cpu")
    for stopped in (True, False):
        trainer.received = stopped
        control = SimpleNamespace(should_save=False, should_evaluate=True, should_training_stop=False)
        callback.on_train_begin(arguments, None, control)
        callback.on_step_end(arguments, None, control)
        assert (control.should_save, control.should_evaluate, control.should_training_stop) == (
            stopped, not stopped, stopped
        )  # fmt: skip
        control.should_save = control.should_evaluate = True  # as Trainer sets them at the end of an epoch
        callback.on_epoch_end(arguments, None, control)
        assert control.should_save == control.should_evaluate == (not stopped)


def test_a_second_training_is_not_stopped_by_the_signal_to_the_first(monkeypatch):
    from foundry_moe.integrations import transformers_trainer

    monkeypatch.setattr(transformers_trainer.transformers.Trainer, "train", lambda self: (self.resumed, self.received))
    trainer = integration.ParallelTrainer.__new__(integration.ParallelTrainer)
    trainer.resumed, trainer.received = "checkpoint", True
    assert trainer.train() == (None, False)
