"""Composer's side of gates: tells them the time, what ranks share, and the loads of each step; knows them again."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.core.data_spec import _default_split_batch
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from foundry_moe.algorithms.backend_log import log_backends
from foundry_moe.algorithms.dmoe_mesh import count_samples
from foundry_moe.algorithms.parameter_rules import RULES, check_rules, pass_rules, say_fresh
from foundry_moe.algorithms.strict_compilation import StrictCompilation
from foundry_moe.algorithms.weights_from_files import read_by_rank
from foundry_moe.layers.context import BatchContext, stay, unchanged
from foundry_moe.layers.lookup import batch_context, moe_layers, note_loads, step_gates
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from foundry_moe.models.native.saving import native_of_model
from foundry_moe.models.same_run import check_model, describe_model
from foundry_moe.parallel.collectives import GateCollectives

_EVENTS = (Event.FIT_START, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BATCH_END)


def progress_of(state: State) -> Progress:
    """How far the run is; after a resumption, what an unbroken run would say."""
    now = state.timestamp
    epochs = float(now.epoch.value)
    if state.dataloader_len is not None and state.dataloader_len.value:
        epochs += now.batch_in_epoch.value / state.dataloader_len.value
    elapsed = state.get_elapsed_duration()
    return Progress(
        ba=int(now.batch.value),
        ep=epochs,
        sp=int(now.sample.value),
        tok=int(now.token.value),
        dur=None if elapsed is None else float(elapsed.value),
    )


# keys that change what the saved weights compute; of others, such as losses or backends, a resumed run may change
_MEANING = ("num_experts", "top_k", "expert_hidden_size", "activation", "shared_expert_hidden_size")


def meaning_of(layers: list[MoELayer]) -> dict[str, Any]:
    """What saved weights mean beyond their shapes, of a model's layers: equal configurations save for their index."""
    first = layers[0]
    gate = {key: value for key, value in asdict(first.gate.config).items() if key not in first.gate.MAY_CHANGE}
    return {
        "layers": [layer.layer_index for layer in layers],
        "gate": {"name": first.config.gate["name"], **gate},
        **{key: _as_data(getattr(first.config, key)) for key in _MEANING},
    }


def _as_data(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class RouterSteps(Algorithm):
    """Gates that follow the time or learn from loads need this: schedules, DeepSeek's bias, `balance_over: batch`.

    `algorithms.dmoe` adds it by itself, and LLM Foundry's trainer does for `model.name: dmoe_causal_lm`. With
    Composer's Trainer and that model, put it among the algorithms.

    As an algorithm it runs before all callbacks: what these save at the end of a batch is after the gates' step.
    When training begins it logs which backend computes the experts, and why (`log_backends`).
    It also refuses to go on from a checkpoint whose experts mean something else than the model's, though they fit.

    YAML::

        algorithms:
          dmoe_steps: {}

    Raises:
        ValueError: when training begins, for such a checkpoint; names the key and both values.
    """

    def __init__(self, **internal: Any) -> None:
        self._rules = internal.pop(RULES, None) or {}  # from `pass_rules`
        if internal:
            raise ValueError(f"algorithms.dmoe_steps.{next(iter(internal))} is not a key of dmoe_steps, which has none")
        self._before: list[Tensor] = []
        self._strict = StrictCompilation()
        self._meaning: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._model: dict[str, Any] = {}
        self._loaded_model: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "meaning": self._meaning, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state.get("meaning") or {}
        self._loaded_model = state.get("model") or {}

    def match(self, event: Event, state: State) -> bool:
        return event in _EVENTS or (event == Event.INIT and bool(self._rules))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            check_rules(state.model, self._rules)  # LLM Foundry has applied them: the experts were there
            return
        context = batch_context(state.model)
        if context is None:
            return
        if event == Event.FIT_START:
            check_hf_checkpointer(state)
            self._compare(moe_layers(state.model))
            self._compare_models(describe_model(state.model))
            _share(context)
            log_backends(state)
        elif event == Event.BATCH_START:
            context.progress = progress_of(state)
            self._strict.batch_began()
        elif event == Event.BEFORE_TRAIN_BATCH:
            # runs again where automatic microbatching starts a batch anew: loads of a failed attempt are left out
            _count_ahead(state, context)
            self._before = note_loads(moe_layers(state.model))
        else:
            context.batch_counts = {}
            step_gates(moe_layers(state.model), self._before, progress_of(state))
            self._strict.batch_ended()

    def _compare_models(self, here: dict[str, Any]) -> None:
        self._model = here
        check_model(here, self._loaded_model)

    def _compare(self, layers: list[MoELayer]) -> None:
        self._meaning = meaning_of(layers)
        free = layers[0].gate.MAY_CHANGE
        for key, ours in self._meaning.items():
            theirs = self._loaded.get(key, ours)
            if key == "gate":
                theirs = {name: value for name, value in theirs.items() if name not in free}
            if theirs != ours:
                raise ValueError(
                    f"experts' {key} ({ours}): the checkpoint was trained with {theirs}; use that, or start anew"
                )


def check_hf_checkpointer(state: State) -> None:
    """Refuses LLM Foundry's callback `hf_checkpointer` where it could not save: it would end the run at its first save.

    Raises:
        ValueError: no Hugging Face family computes what this model does; names the key in the way.
    """
    for callback in state.callbacks:
        if any(cls.__name__ == "HuggingFaceCheckpointer" for cls in type(callback).__mro__):
            try:
                native_of_model(state.model)
            except ValueError as error:
                raise ValueError(
                    f"callbacks.hf_checkpointer: {error}; or take it out: elastic_checkpoint keeps the model, and "
                    "`foundry-moe checkpoints export` writes it under our own names"
                ) from error


def _share(context: BatchContext) -> None:
    """Gives gates all ranks, where nobody has given them any."""
    if dist.get_world_size() == 1:
        return
    ranks = GateCollectives()
    if context.sum_over_ranks is unchanged:
        context.sum_over_ranks = ranks.sum
    if context.max_over_ranks is unchanged:
        context.max_over_ranks = ranks.largest
    if context.shuffle is stay:
        context.shuffle = ranks.shuffle


def _count_ahead(state: State, context: BatchContext) -> None:
    """With `balance_over: batch` and several microbatches, counts the choices of the whole batch before the first."""
    context.batch_counts = {}
    wanted = any(
        layer.config.balance_over == "batch" and "balance" in layer.loss_weights for layer in moe_layers(state.model)
    )
    samples, size = count_samples(state.batch), state.device_train_microbatch_size
    if not wanted or samples is None or not isinstance(size, int | float) or math.ceil(samples / size) < 2:
        return

    def run_forward() -> None:
        for microbatch in _default_split_batch(state.batch, size):
            with get_precision_context(state.precision, state.precision_config):
                state.model(state.device.batch_to_device(microbatch))

    # dropout draws the same numbers now as it will when these microbatches are trained on
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        context.count_ahead(run_forward)


def add_steps_algorithm(config: dict[str, Any]) -> dict[str, Any]:
    """LLM Foundry config transform: a model built with dMoE layers gets `algorithms.dmoe_steps`."""
    model = config.get("model") or {}
    if model.get("name") == "dmoe_causal_lm":
        algorithms = dict(config.get("algorithms") or {})
        algorithms.setdefault("dmoe_steps", {})
        config["algorithms"] = algorithms
    return pass_rules(say_fresh(read_by_rank(config)))
