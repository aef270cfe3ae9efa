"""HF `Trainer`, and trainers derived from it such as TRL's, for a model of `parallelize`.

The public name is `ParallelTrainer` of `foundry_moe.integrations.transformers`. Three places of Trainer's internals are
replaced (marked 1 to 3; transformers 5.24); everything else is its public methods, arguments and callbacks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import TrainerCallback

from foundry_moe.checkpoint import Reader, Writer
from foundry_moe.integrations.transformers_parallel import save_pretrained
from foundry_moe.schema import UserError

STATE = "state"  # of a checkpoint's folder: the folder of `Writer`
# Trainer would clip fp16's scaled gradients, and read or send weights that checkpoints do not have in one file
REFUSED = ("fp16", "load_best_model_at_end", "push_to_hub")
_Trainer: Any = transformers.Trainer  # untyped: its attributes depend on the version


class ParallelTrainer(_Trainer):
    """A Trainer for a model that `parallelize` has sharded. The arguments are Trainer's.

        class ParallelSFTTrainer(ParallelTrainer, SFTTrainer): ...  # the same for a derived trainer

    Accelerate prepares the optimizer and data alone. Checkpoints hold weights, optimizer and scheduler as `Writer`
    saves them, and resume on any mesh. SIGINT or SIGTERM on any rank saves after the step, and `train` returns.

    Raises:
        ValueError: an argument that is not supported (`REFUSED`), or a checkpoint that is not complete.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.resumed: str | None = None  # the checkpoint that the next training begins with
        super().__init__(*args, **kwargs)
        if given := [name for name in REFUSED if getattr(self.args, name)]:
            raise UserError(f"{', '.join(given)}: not supported by ParallelTrainer; set to False")
        # 1: set by Trainer for models that transformers has sharded; it then refuses to save what (2) saves
        self.is_distributed_loading_by_transformers = True
        self.add_callback(_ResumeAndStop(self))

    def create_accelerator_and_postprocess(self) -> None:
        settings = self.args.accelerator_config
        # gradients are reduced in each microbatch: Trainer would ask the model's `distributed_config` how to defer it
        given = settings.gradient_accumulation_kwargs or {}
        settings.gradient_accumulation_kwargs = {**given, "sync_each_batch": True}
        super().create_accelerator_and_postprocess()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder for `from_pretrained`. Every rank calls this. Checkpoints have no such files."""
        if _internal_call and not self.args.save_only_model:
            return
        folder = output_dir or self.args.output_dir
        save_pretrained(self.model, folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """2: Trainer would write rank 0's part of the optimizer's state."""
        writer = Writer(os.path.join(output_dir, STATE))
        dcp.save(self._training_state(), storage_writer=writer, checkpoint_id=str(self.state.global_step))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """3: Trainer would load whole weights on each rank. `load_training_state` follows when the optimizer exists."""
        if not Reader(os.path.join(resume_from_checkpoint, STATE)).steps():
            raise UserError(f"resume_from_checkpoint ({resume_from_checkpoint}) is not complete: give an earlier one")
        self.resumed = resume_from_checkpoint

    def load_training_state(self) -> None:
        """Loads the checkpoint that `train(resume_from_checkpoint=...)` has named, if any."""
        if self.resumed is None:
            return
        state, folder = self._training_state(), os.path.join(self.resumed, STATE)
        dcp.load(state, storage_reader=Reader(folder))
        optimizer = self.optimizer.optimizer
        set_state_dict(self.model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.lr_scheduler.load_state_dict(state["scheduler"])
        self.resumed = None

    def _training_state(self) -> dict[str, Any]:
        parameters, moments = get_state_dict(self.model, self.optimizer.optimizer)  # of Accelerate's wrapper
        return {"model": parameters, "optim": moments, "scheduler": self.lr_scheduler.state_dict()}


class _ResumeAndStop(TrainerCallback):
    """Loads the state when the optimizer exists, and ends training with a save after a signal."""

    def __init__(self, trainer: ParallelTrainer) -> None:
        self.trainer, self.received = trainer, False
        self.before: dict[int, Any] = {}

    def _note(self, *_: Any) -> None:
        self.received = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.load_training_state()
        self.received = False
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        received = torch.tensor(float(self.received), device=args.device)
        dist.all_reduce(received)  # all ranks stop after the same step
        if received:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
