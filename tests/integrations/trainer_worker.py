"""A process of `test_trainer`: the page's program and TRL on a tiny model, or the same trainers of one process alone.

torchrun --nproc-per-node N trainer_worker.py FOLDER TASK...
"""

from __future__ import annotations

import json
import os
import string
import sys
import time
from glob import glob  # noqa: F401
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments  # noqa: F401
from trl import SFTConfig, SFTTrainer

from foundry_moe.integrations.transformers import ParallelTrainer, parallelize  # noqa: F401
from tests.helpers.pages import blocks

FOLDER = Path(sys.argv[1])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PROGRAM = blocks("how-to/transformers_parallel.md", "python")[1]
SETTINGS = {
    "max_steps": 20, "per_device_train_batch_size": 4 // RANKS, "learning_rate": 3e-3, "max_grad_norm": 0.5,
    "save_steps": 10, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0,
}  # fmt: skip
TRAINER = SETTINGS | {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 4 // RANKS}


class Samples(list):
    """Texts of which other numbers of tokens have labels."""

    def __init__(self, count: int, delay_s: float = 0.0, whole: bool = False) -> None:
        self.delay_s = delay_s
        ids = torch.randint(64, (count, 24), generator=torch.Generator().manual_seed(count)).cumsum(1) % 64
        hidden = torch.zeros(count) if whole else torch.arange(count) * 7 % 20
        labels = torch.where(torch.arange(24) < hidden[:, None], -100, ids)
        super().__init__({"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True))

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.delay_s)
        return super().__getitem__(index)


def parts(delay_s: float = 0.0) -> dict[str, Any]:
    """Names of the page's program. An epoch has 15 steps."""
    return globals() | {
        "folder": FOLDER / "model", "settings": TRAINER,
        "samples": Samples(60, delay_s), "held_out": Samples(8, whole=True),
    }  # fmt: skip


def record(name: str, trainer: Any) -> None:
    """Writes what the trainer logged, and all parameters."""
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trainer.model.named_parameters()}
    if RANK == 0:
        torch.save(whole, FOLDER / f"{name}.pt")
        log = trainer.state.log_history
        found = {key: [entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm", "eval_loss")}
        (FOLDER / f"{name}.json").write_text(json.dumps(found | {"step": trainer.state.global_step}))


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: i for i, character in enumerate(["<pad>", "<eos>", *string.digits, *"+= "])}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")


def fine_tune(name: str, trainer_class: Any, model: Any) -> None:
    """SFT with its defaults: gradient checkpointing, prompts of unequal length without loss."""
    questions = [{"prompt": f"{7 * a} + {b} = ", "completion": str(7 * a + b)} for a in range(12) for b in range(8)]
    arguments = SFTConfig(str(FOLDER / name), **SETTINGS | {"bf16": False})
    data = Dataset.from_list(questions)
    trainer = trainer_class(model, arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    record(name, trainer)


def main() -> None:
    for task in sys.argv[2:]:
        names = parts(delay_s=0.05 if task == "interrupted" else 0.0)
        if task.startswith("one process"):
            model = AutoModelForCausalLM.from_pretrained(FOLDER / ("balanced model" if "balanced" in task else "model"))
            if task == "one process SFT":
                fine_tune(task, SFTTrainer, model)
                continue
            arguments = TrainingArguments(str(FOLDER / task), **TRAINER)
            trainer = Trainer(model, arguments, train_dataset=names["samples"], eval_dataset=names["held_out"])
            trainer.train()
        elif task == "SFT":
            exec(PROGRAM[PROGRAM.index("class ") :], names)
            model = AutoModelForCausalLM.from_pretrained(FOLDER / "model")
            parallelize(model, {"expert": RANKS})
            fine_tune(task, names["ParallelSFTTrainer"], model)
            continue
        else:
            program = PROGRAM
            if task == "balanced":  # by the tokens of all ranks, as of one process
                program = program.replace("weights=folder", 'weights=folder, aux_loss="all"')
                names["folder"] = FOLDER / "balanced model"
            exec(program, names | (given := {"out": str(FOLDER / task)}), given)
            trainer = given["trainer"]
        record(task, trainer)


if __name__ == "__main__":
    if not (FOLDER / "model").exists():
        raise SystemExit("test_trainer writes FOLDER/model")
    main()
    torch.distributed.destroy_process_group()
    time.sleep(1)  # gloo's threads free their tensors
