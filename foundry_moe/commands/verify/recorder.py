"""Data and callback of a trial: random tokens, and its record with the whole tensors that must be equal bit by bit.

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import llmfoundry.command_utils  # noqa: F401  (once in the fork server, not in each child)
import torch
from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from composer.utils import dist
from llmfoundry.data.utils import get_tokens_per_batch_func
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foundry_moe.certify import Recorder, read_record
from foundry_moe.commands.verify.formula import Capture
from foundry_moe.commands.verify.shrink import SAVE_AFTER
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.schema import plain_name

KINDS = {"gate": "gate", "experts": "experts", "shared_expert": "shared"}
# Composer's Hugging Face wrapper looks through all of them for each model: they are imported once, in the fork server
CAUSAL_MODELS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING.values())
IDS = (2, 8)  # sequences and positions of the tokens that a converted model is compared on


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


class TrialRecorder(Callback):
    """Fills `seen`, on rank 0.

    `record` (see `certify.Recorder`), `kinds` (gate, experts, shared or dense, by parameter), `loss/step`,
    `gradient/name` (of experts and gates, of the first step), `begin/name`, `saved/name` and `resumed/name` (all
    tensors), `buffer/name` (after `SAVE_AFTER` steps), `agree/name` (how far apart ranks' buffers are), `formula` (see
    `Capture`), `converted` (two logits). The last run's recorder is `TrialRecorder.last`.
    """

    last: ClassVar[TrialRecorder]

    def __init__(self, microbatches: int, with_formula: bool, source: str) -> None:
        self.microbatches, self.with_formula, self.source = microbatches, with_formula, source
        self.seen: dict[str, Any] = {}
        self._backward_passes = 0
        self._capture: Capture | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="verify-record-")
        TrialRecorder.last = self

    def fit_start(self, state: State, logger: Logger) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False  # Composer enables it, but fp32 is the reference here
        done = state.timestamp.batch.value
        self._recorder = Recorder(state.model, state.optimizers[0], self._folder.name, step=done)
        self.seen["kinds"] = _kinds(state.model)
        if done:
            self.seen.update({f"resumed/{name}": tensor for name, tensor in whole_state(state).items()})
            return
        self.seen.update({f"begin/{name}": whole(tensor) for name, tensor in self._recorder.parameters.items()})
        if self.source:
            self.seen["converted"] = _logits_of_both(state.model, self.source)
        if self.with_formula:
            self._capture = Capture(state.model)

    def after_backward(self, state: State, logger: Logger) -> None:
        self._backward_passes += 1
        if self._backward_passes % self.microbatches:
            return
        self._recorder.batch(torch.as_tensor(state.loss))
        if self._backward_passes == self.microbatches:
            for name, parameter in self._recorder.parameters.items():
                if parameter.grad is not None and self.seen["kinds"][name] != "dense":
                    self.seen[f"gradient/{name}"] = whole(parameter.grad)
        if self._capture is not None:
            self.seen["formula"] = self._capture.finish()
            self._capture = None

    def batch_end(self, state: State, logger: Logger) -> None:
        done = state.timestamp.batch.value
        loss = state.total_loss_dict["loss/train/total"]
        self.seen[f"loss/{done - 1}"] = torch.as_tensor(loss).detach().double().cpu()
        if done == SAVE_AFTER:
            self.seen.update({f"saved/{name}": tensor for name, tensor in whole_state(state).items()})
            for name, buffer in _buffers(state.model).items():
                self.seen[f"buffer/{name}"] = buffer
                everyone = dist.all_gather_object(buffer)
                self.seen[f"agree/{name}"] = torch.stack([(other - buffer).abs().max() for other in everyone]).max()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._recorder.close()
        if dist.get_global_rank() == 0:
            self.seen["record"] = read_record(self._folder.name)
        self._folder.cleanup()


def _kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each parameter."""
    layers = [f"{plain_name(name)}." for name in named_moe_layers(model)]
    kinds = {}
    for name in map(plain_name, dict(model.named_parameters())):
        part = next((name.removeprefix(layer).partition(".")[0] for layer in layers if name.startswith(layer)), "")
        kinds[name] = KINDS.get(part, "dense")
    return kinds


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Persistent floating-point state of gates, such as the bias that balances without a loss."""
    return {
        f"{plain_name(name)}.gate.{key}": buffer.detach().cpu().clone()
        for name, layer in named_moe_layers(model).items()
        for key, buffer in layer.gate.named_buffers()
        if buffer.is_floating_point() and not isinstance(buffer, DTensor)
    }


def whole_state(state: State) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, whole, by name: equal on any mesh. Collective."""
    optimizer: Any = get_optimizer_state_dict(state.model, state.optimizers)["state"]
    sections = {"model": get_model_state_dict(state.model)}
    sections |= {f"optimizer/{name}": moments for name, moments in optimizer.items()}
    return {
        f"{section}|{name}": whole(tensor)
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }


@torch.no_grad()
def _logits_of_both(model: nn.Module, source: str) -> tuple[Tensor, Tensor]:
    """Logits of a converted model, and of the one in the folder it came from, in evaluation."""
    from transformers import AutoModelForCausalLM

    inner: Any = model.model  # Composer's wrapper takes batches
    device = next(model.parameters()).device
    theirs = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32).to(device).eval()
    ids = torch.randint(1, theirs.config.vocab_size, IDS, generator=torch.Generator().manual_seed(0)).to(device)
    training = model.training
    model.eval()
    ours = inner(input_ids=ids).logits.float().cpu()
    model.train(training)
    return ours, theirs(input_ids=ids).logits.float().cpu()


def build_loader(
    device_batch_size: int,
    length: int,
    vocabulary: int,
    steps: int,
    microbatch: int,
    uneven: bool,
    tokenizer: Any = None,
) -> DataSpec:
    """LLM Foundry's constructor of the loader: tokens uniform below `vocabulary`, without 0, some models' padding.

    A microbatch of the job is consecutive sequences, of which each rank has a consecutive part. With `uneven`, each
    sequence has its own numbers of real and of trained tokens; else all are both.
    """
    ranks, rank = dist.get_world_size(), dist.get_global_rank()
    own = [i for i in range(steps * device_batch_size * ranks) if i // microbatch % ranks == rank]
    rows = [_draw_row(i, length, vocabulary, uneven) for i in own]
    batches = [rows[i : i + device_batch_size] for i in range(0, len(rows), device_batch_size)]
    keys = [{key: torch.stack([row[key] for row in batch]) for key in batch[0]} for batch in batches]
    return DataSpec(keys, get_num_tokens_in_batch=get_tokens_per_batch_func())


def _draw_row(index: int, length: int, vocabulary: int, uneven: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids_S = torch.randint(1, vocabulary, (length,), generator=generator)
    real, first = length, 0
    if uneven:  # the last of the real tokens are trained, at least one
        real = int(torch.randint(2, length + 1, (), generator=generator))
        first = int(torch.randint(1, real, (), generator=generator))
    position_S = torch.arange(length)
    labels_S = ids_S.masked_fill((position_S < first) | (position_S >= real), -100)
    return {"input_ids": ids_S, "labels": labels_S, "attention_mask": (position_S < real).long()}
