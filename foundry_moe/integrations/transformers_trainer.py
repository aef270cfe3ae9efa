"""HF `Trainer`, and trainers derived from it such as TRL's, for a model of `parallelize`.

The public name is `ParallelTrainer` of `foundry_moe.integrations.transformers`. Three places of Trainer's internals are
replaced (marked 1 to 3; transformers 5.24); everything else is its public methods, arguments and callbacks.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from foundry_moe.checkpoint import Reader, Writer
from foundry_moe.integrations.transformers_parallel import aux_loss_weight, save_pretrained
from foundry_moe.schema import UserError

STATE = "state"  # of a checkpoint's folder: the folder of `Writer`
# Trainer would clip fp16's scaled gradients, read or send weights that checkpoints do not have in one file, convert the
# sharded model's weights, shard it again, or save after a signal to one rank alone
REFUSED = (
    "fp16", "load_best_model_at_end", "push_to_hub", "fp16_full_eval", "bf16_full_eval", "fsdp", "deepspeed",
    "enable_jit_checkpoint",
)  # fmt: skip
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
        self.resumed: str | None = None  # the checkpoint that the training begins with
        self.received = False  # this rank has been asked to stop
        super().__init__(*args, **kwargs)
        # 1: set by Trainer for models that transformers has sharded; it then refuses to save what (2) saves
        self.is_distributed_loading_by_transformers = True
        self.add_callback(_ResumeAndStop(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's `__init__` begins with this."""
        if refused := [name for name in REFUSED if getattr(self.args, name)]:
            raise UserError(f"{', '.join(refused)}: not supported by ParallelTrainer; omit")
        settings = self.args.accelerator_config
        given = settings.gradient_accumulation_kwargs
        # gradients are reduced in each microbatch: Trainer would ask the model's `distributed_config` how to defer it
        settings.gradient_accumulation_kwargs = {**(given or {}), "sync_each_batch": True}
        try:
            super().create_accelerator_and_postprocess()
        finally:
            settings.gradient_accumulation_kwargs = given  # Trainer adds num_steps, which a second one refuses
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # by `accelerate launch`
            raise UserError("accelerate's configuration has FSDP or DeepSpeed, which would shard the model again: omit")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.resumed, self.received = None, False
        main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
        numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            return super().train(*args, **kwargs)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, *_: Any) -> None:
        self.received = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Where Trainer multiplies the loss by the number of ranks, it would multiply the load-balancing loss too."""
        base: Any = super().compute_loss
        derived = base.__func__ is not _Trainer.compute_loss  # such as SFTTrainer's, which adds that loss afterwards
        if derived or num_items_in_batch is None or not self.args.average_tokens_across_devices:
            return base(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        loss, outputs = base(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is not None and outputs.loss is not None:
            loss = loss - (self.accelerator.num_processes - 1) * aux_loss_weight(self.model) * aux_loss.to(loss.device)
        return (loss, outputs) if return_outputs else loss

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
        given = f"resume_from_checkpoint ({resume_from_checkpoint})"
        if not os.path.isfile(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME)):  # written last
            raise UserError(f"{given} is not complete: give an earlier one")
        if not Reader(os.path.join(resume_from_checkpoint, STATE)).steps():
            raise UserError(f"{given} has no {STATE} to resume: saved with save_only_model, or not by ParallelTrainer")
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

    def _training_state(self) -> dict[str, Any]:
        parameters, moments = get_state_dict(self.model, self.optimizer.optimizer)  # of Accelerate's wrapper
        return {"model": parameters, "optim": moments, "scheduler": self.lr_scheduler.state_dict()}


class _ResumeAndStop(TrainerCallback):
    """Loads the state when the optimizer exists, and ends training with a save after a signal."""

    def __init__(self, trainer: ParallelTrainer) -> None:
        self.trainer, self.stopped = trainer, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.load_training_state()
        self.stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        received = torch.tensor(float(self.trainer.received), device=args.device)
        dist.all_reduce(received)  # all ranks stop after the same step
        if received:
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # would come before the save, and decide on it with save_strategy="best"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped:  # and saved
            control.should_save = control.should_evaluate = False
