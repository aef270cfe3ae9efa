"""The Composer algorithm `dmoe_steps`: gives gates the run's progress, collectives and the loads of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.core.data_spec import _default_split_batch
from composer.core.precision import Precision, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader

from foundry_moe.algorithms.dmoe_mesh import check_parallelism, count_samples, show_model
from foundry_moe.algorithms.parameter_rules import check_rules, rules_of
from foundry_moe.algorithms.weights_from_files import describe_weights
from foundry_moe.flops import causal_lm, looked_up_params, num_layers, query_width, training_flops
from foundry_moe.layers.context import unchanged
from foundry_moe.layers.forward_pass import count_targets
from foundry_moe.layers.lookup import loads_so_far, moe_layers, step_gates
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from foundry_moe.models.native.saving import native_of_model
from foundry_moe.models.same_run import check_model, describe_experts, describe_model
from foundry_moe.ops.backends import describe_backend
from foundry_moe.parallel.collectives import GateCollectives
from foundry_moe.schema import UserError, from_mapping

log = logging.getLogger(__name__)

_EVENTS = (
    Event.INIT,
    Event.FIT_START,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.BATCH_END,
)
# losses that need sums over the whole batch with `balance_over: batch`
_NOT_LINEAR = {"balance", "importance", "load"}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a model and an optimizer do not show of the run that built them; from LLM Foundry's config transform.

    Attributes:
        parameter_rules: patterns of `optimizer.disable_grad` and `optimizer.param_groups`.
        weights_source: folder or name of a Hugging Face model; null for a model of another kind.
        weights_loaded: false: the weights are fresh; true: `algorithms.dmoe` reads them; null: as the model records.
    """

    parameter_rules: dict[str, Any] = field(default_factory=dict)
    weights_source: str | None = None
    weights_loaded: bool | None = None


def progress_of(state: State) -> Progress:
    """The run's progress; a resumed run has that of an uninterrupted one."""
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


class GateSteps(Algorithm):
    """Steps gates that follow a schedule or use loads: schedules, DeepSeek's bias, `balance_over: batch`.

    It also weighs the auxiliary losses of microbatches by their real tokens, whatever the trainer weighs the loss by.

    `algorithms.dmoe` adds it, and LLM Foundry's trainer does for `model.name: dmoe_causal_lm`. With Composer's Trainer
    and that model, add it to the algorithms.

    Algorithms run before callbacks, so a checkpoint at the end of a batch contains the gates' step. When training
    begins, it logs the backend of the experts, and refuses to resume from a checkpoint whose weights have the same
    shapes but compute another function.

    YAML:

        algorithms:
          dmoe_steps: {}

    Raises:
        ValueError: when training begins, for such a checkpoint; names the key and both values.
    """

    def __init__(self, **facts: Any) -> None:
        self.facts = from_mapping(RunFacts, facts, "algorithms.dmoe_steps")
        self.beside_dmoe = False  # set by `algorithms.dmoe`, which puts experts into the model
        self._layers: list[MoELayer] = []  # found once: to walk through a model takes 0.1 ms
        self._before: list[Tensor] = []
        self._rank_tokens: Tensor | None = None  # real tokens of the batch, the mean over ranks
        self._ours: dict[str, Any] = {"experts": {}, "model": {}}
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._ours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def match(self, event: Event, state: State) -> bool:
        return event in _EVENTS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            if moe_layers(state.model) and not self.beside_dmoe:
                check_rules(state.model, self.facts.parameter_rules)  # which LLM Foundry has applied to the experts too
                check_parallelism(state)
                log_parameter_counts(state, logger)
            show_model(state)
            return
        if event == Event.FIT_START:
            self._layers = moe_layers(state.model)
            # first at a batch's end: Composer's EMA averages the gates' buffers there
            state.algorithms.insert(0, state.algorithms.pop(state.algorithms.index(self)))
        if not self._layers:
            return
        layers, context = self._layers, self._layers[0].context
        if event == Event.FIT_START:
            check_loaders(state)
            check_hf_checkpointer(state)
            self._ours = {"experts": describe_experts(layers), "model": describe_model(state.model)}
            for where, described in self._ours.items():
                check_model(described, self._loaded.get(where), where)
            if dist.get_world_size() > 1 and context.sum_over_ranks is unchanged:
                GateCollectives().connect(context)
            log_backends(state)
        elif event == Event.BATCH_START:
            context.progress = progress_of(state)
        elif event == Event.BEFORE_TRAIN_BATCH:
            # automatic microbatching repeats a batch that ran out of memory: loads of the failed attempt are discarded
            _count_ahead(state, layers)
            _report_no_targets(state)
            self._before = loads_so_far(layers)
            tokens = real_tokens(state.batch) if any(layer.loss_weights for layer in layers) else None
            self._rank_tokens = None
            if tokens is not None:
                targets = count_targets(state.batch.get("labels"))
                counts_2 = torch.stack([tokens, tokens if targets is None else targets])
                tokens, targets = context.sum_over_ranks(state.device.tensor_to_device(counts_2)).unbind()
                # a batch without targets trains nothing: the scale is x / inf
                self._rank_tokens = (tokens.double() / dist.get_world_size()).masked_fill(targets == 0, torch.inf)
        elif event == Event.BEFORE_FORWARD:
            tokens = real_tokens(state.batch)
            if tokens is not None and self._rank_tokens is not None:
                context.auxiliary_scale = tokens.double() / self._rank_tokens.clamp(min=1)
                if state.precision == Precision.AMP_FP16 and state.scaler is not None:
                    context.auxiliary_scale = state.scaler.scale(context.auxiliary_scale)
        else:
            context.batch_counts, context.auxiliary_scale = {}, None
            step_gates(layers, self._before, progress_of(state))


def real_tokens(batch: Any) -> Tensor | None:
    """The number of tokens that are not padding, a scalar; None for a batch without `input_ids`."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        return None
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.bool().sum()
    return torch.full((), ids.numel(), device=ids.device)


def check_loaders(state: State) -> None:
    """Refuses a loader without a batch, for whose first batch Composer would wait for ever.

    Raises:
        ValueError: names the loader and the arithmetic.
    """
    loaders = {"train_loader": state.train_dataloader}
    loaders |= {f"eval_loader ({e.label})": getattr(e.dataloader, "dataloader", None) for e in state.evaluators}
    for name, loader in loaders.items():
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, Sized) and len(loader) == 0:
            raise UserError(
                f"{name} has no batch on rank {dist.get_global_rank()}: {len(loader.dataset)} samples are fewer than "
                f"the {loader.batch_size} of its batch, and drop_last (true) drops the rest; lower the batch size, add "
                "data, or use drop_last: false"
            )


def _report_no_targets(state: State) -> None:
    """Logs microbatches of this rank whose labels are all ignored."""
    labels = state.batch.get("labels") if isinstance(state.batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_cuda:
        return
    size = state.device_train_microbatch_size
    parts = labels.split(size if isinstance(size, int) else len(labels))
    empty = sum(not count_targets(part) for part in parts)
    if empty:
        log.warning(
            "batch %d: %d of %d microbatches of rank %d have no targets (all labels are -100): they add nothing to the "
            "loss",
            *(int(state.timestamp.batch) + 1, empty, len(parts), dist.get_global_rank()),
        )


def check_hf_checkpointer(state: State) -> None:
    """Refuses LLM Foundry's callback `hf_checkpointer` for a model that it cannot save.

    Raises:
        ValueError: no Hugging Face family computes the same as this model; names the key that differs.
    """
    for callback in state.callbacks:
        if any(cls.__name__ == "HuggingFaceCheckpointer" for cls in type(callback).__mro__):
            try:
                native_of_model(state.model)
            except UserError as error:
                raise UserError(
                    f"callbacks.hf_checkpointer: {error}; or remove it: elastic_checkpoint saves the model, and "
                    "`foundry-moe checkpoints export` writes it under this package's names"
                ) from error


def log_parameter_counts(state: State, logger: Logger, *, idle: int = 0) -> None:
    """Logs the numbers of parameters with experts under LLM Foundry's names, and keeps its own from being logged.

    LLM Foundry counts before `algorithms.dmoe` adds experts, and logs its counts after that. MLflow refuses a parameter
    that is logged twice, with all metrics that it writes with it.

    Args:
        idle: of `n_active_params` as the model counts them, those that a token does not pass through.
    """
    model = state.model
    for cached in ("n_total_params", "n_active_params"):  # MPT's, also the base of the speed monitor's MFU
        vars(model).pop(cached, None)
    total = sum(parameter.numel() for parameter in model.parameters())
    active = getattr(model, "n_active_params", total) - idle
    vars(model)["n_active_params"] = active
    inner = causal_lm(model)
    if not hasattr(model, "flops_per_batch") and inner is not None:  # of Hugging Face, for MFU
        each = partial(
            training_flops,
            active - looked_up_params(inner),
            layers=num_layers(inner.config),
            width=query_width(inner.config),
        )
        vars(model)["flops_per_batch"] = partial(_flops_per_batch, each)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    counts = {"n_params": total, "n_active_params": active, "n_trainable_params": trained}
    logger.log_hyperparameters(counts)
    log_others = logger.log_hyperparameters
    logger.log_hyperparameters = lambda parameters: log_others(  # type: ignore[method-assign]
        {name: value for name, value in parameters.items() if name not in counts}
    )


def _flops_per_batch(each: Callable[..., float], batch: Mapping[str, Tensor]) -> float:
    """Forward and backward; `each` is of a token in a sequence."""
    ids = batch["input_ids"]
    return ids.numel() * each(sequence=ids.shape[1])


def log_backends(state: State) -> None:
    """Logs once on rank 0 which backend computes the experts, and why; several lines if layers differ.

    Raises:
        ValueError: the run's backend does not run on this device with this precision.
    """
    with get_precision_context(state.precision, state.precision_config):
        lines = dict.fromkeys(_describe_backend(layer) for layer in moe_layers(state.model))
    if dist.get_global_rank() == 0:
        for line in lines:
            log.info("dMoE experts: %s", line)


def _describe_backend(layer: MoELayer) -> str:
    """`describe_backend` of a layer under the current autocast."""
    weight = next(layer.experts.parameters())
    kind, config = weight.device.type, layer.config
    assert config.expert_hidden_size != "auto"
    return describe_backend(
        config.backend,
        weight.device,
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype,
        width=layer.d_model,
        hidden=config.expert_hidden_size,
    )


def _count_ahead(state: State, layers: list[MoELayer]) -> None:
    """With `balance_over: batch` and several microbatches, sums over the whole batch before the first of them."""
    context = layers[0].context
    context.batch_counts = {}
    wanted = any(layer.config.balance_over == "batch" and _NOT_LINEAR & layer.wanted_losses for layer in layers)
    samples, size = count_samples(state.batch), state.device_train_microbatch_size
    if not wanted or samples is None or not isinstance(size, int | float) or samples <= size:
        return

    def run_forward() -> None:
        for microbatch in _default_split_batch(state.batch, size):
            with get_precision_context(state.precision, state.precision_config):
                state.model(state.device.batch_to_device(microbatch))

    # dropout draws the same numbers here as when these microbatches are trained
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        context.count_ahead(run_forward)


def add_steps_algorithm(config: dict[str, Any]) -> dict[str, Any]:
    """LLM Foundry config transform: a run with dMoE layers, or trained by Muon, gets `algorithms.dmoe_steps`.

    Every run with experts logs its learning rate, tokens per second, MFU and memory, by Composer's callbacks.
    """
    model, algorithms = config.get("model") or {}, dict(config.get("algorithms") or {})
    converted, built = "dmoe" in algorithms, model.get("name") == "dmoe_causal_lm"
    # Muon looks at the model, also at one without experts
    if converted or built or (config.get("optimizer") or {}).get("name") == "muon":
        facts = describe_weights(config) if converted else {}
        if (rules := rules_of(config)) and (converted or built):
            facts["parameter_rules"] = rules
        algorithms["dmoe_steps"] = {**facts, **(algorithms.get("dmoe_steps") or {})}
        config["algorithms"] = algorithms
    if "dmoe_steps" in algorithms:
        monitors: dict[str, Any] = {"lr_monitor": {}, "speed_monitor": {"window_size": 10}}
        if torch.cuda.is_available():  # it warns on a CPU
            monitors["memory_monitor"] = {}
        config["callbacks"] = {**monitors, **(config.get("callbacks") or {})}
    return config
