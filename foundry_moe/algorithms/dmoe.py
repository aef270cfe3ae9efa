"""The Composer algorithm `dmoe`: a thin class over `apply_dmoe`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, overload

from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from foundry_moe.algorithms.dmoe_mesh import check_parallelism, place_on_mesh, show_model
from foundry_moe.algorithms.gate_steps import GateSteps, log_parameter_counts
from foundry_moe.algorithms.parameter_rules import apply_rules
from foundry_moe.algorithms.weights_from_files import WeightsFromFiles, check_loaded, tie_weights
from foundry_moe.config import AUTO, MESH_NEEDS_PLAN, META_NEEDS_MESH, MoEConfig
from foundry_moe.layers.lookup import batch_context, idle_parameters
from foundry_moe.layers.moe import MoELayer
from foundry_moe.models.adapters import load_adapter
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.schema import UserError, from_mapping, takes_keys_of, with_keys


@with_keys(MoEConfig)
class DMoE(Algorithm):
    """Dropless Mixture-of-Experts: replaces feed-forward blocks by experts when training begins.

    Runs on `Event.INIT`, before the model is wrapped or sharded, on MPT models and on Hugging Face causal LMs with
    Llama-like blocks; and after each loss, to scale auxiliary losses as the trainer scales the loss.

    In Python, `DMoE(num_experts=8, top_k=2)` or `DMoE(MoEConfig(...))`.

    YAML:

        algorithms:
          dmoe:
            num_experts: 8
            top_k: 2
            init: upcycle            # or random
            loss: {balance: 0.01, z: 0.001}

    Raises:
        ValueError: an unknown key (the nearest is named) or an invalid value; before any GPU work.
    """

    @overload
    def __init__(self, config: MoEConfig) -> None: ...

    @overload
    @takes_keys_of(MoEConfig)
    def __init__(self, **settings: Any) -> None: ...

    def __init__(self, config: MoEConfig | None = None, **settings: Any) -> None:
        self._files: WeightsFromFiles | None = None  # which this algorithm reads, from `Event.INIT` on
        if config is None:
            config = from_mapping(MoEConfig, settings, "algorithms.dmoe")
        elif settings or not isinstance(config, MoEConfig):
            raise UserError(f"DMoE takes a MoEConfig, or its keys as in DMoE(num_experts=8), not {config!r}")
        self.config = config
        if self.config.mesh == AUTO:
            raise UserError(f"algorithms.dmoe.{MESH_NEEDS_PLAN}")
        self._settings = settings or vars(config)
        self._start = None if self.config.lora_config is None else self.config.lora_config.start

    def __repr__(self) -> str:
        return f"DMoE({', '.join(f'{key}={value!r}' for key, value in self._settings.items())})"

    @staticmethod
    def required_on_load() -> bool:
        """A checkpoint of a model with experts does not load into a dense model."""
        return True

    def match(self, event: Event, state: State) -> bool:
        reads = self._files is not None or self._start is not None
        return event in (Event.INIT, Event.AFTER_LOSS) or (event == Event.BEFORE_LOAD and reads)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            check_parallelism(state)
            tie_weights(state)
            show_model(state)
            steps = next((found for found in state.algorithms if isinstance(found, GateSteps)), None)
            if steps is None:
                state.algorithms.append(steps := GateSteps())
            steps.beside_dmoe, facts = True, steps.facts
            if facts.weights_source and facts.weights_loaded:
                self._files = WeightsFromFiles(facts.weights_source)
            layers = self._put_experts(state, facts.weights_loaded)
            if facts.weights_source and self._files is None:
                check_loaded(state, facts.weights_source)
            if self.config.mesh is None and any(tensor.is_meta for layer in layers for tensor in layer.parameters()):
                raise UserError(META_NEEDS_MESH)
            apply_rules(state.model, state.optimizers or (), facts.parameter_rules)
            log_parameter_counts(state, logger, idle=idle_parameters(state.model))
            if self.config.mesh_config is not None:
                place_on_mesh(state, self.config.mesh_config)
            if self._files is not None:
                self._files.prepare(state.device._device)  # type: ignore[arg-type]
            logger.log_hyperparameters({"dmoe/layers": len(layers), "dmoe/num_experts": self.config.num_experts})
            return
        if event == Event.BEFORE_LOAD:
            if self._files is not None:
                self._files.read(state)
            if self._start is not None:
                load_adapter(state.model, self._start)
            return
        context = batch_context(state.model)
        if context is not None:
            labels = state.batch.get("labels") if isinstance(state.batch, Mapping) else None
            state.loss = context.track_scale(state.loss, labels)

    def _put_experts(self, state: State, loaded: bool | None) -> list[MoELayer]:
        """Converts the model, and reports each warning once, not once per layer."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layers = apply_dmoe(state.model, self.config, state.optimizers, loaded=loaded)
        if getattr(state.model, "using_peft", False):  # with model.peft_config
            # Composer's state dict would have peft's tensors alone: no experts, no adapters of experts
            state.model.should_save_peft_only = False  # type: ignore[assignment]
        for text in dict.fromkeys(str(warning.message) for warning in caught):
            warnings.warn(text, stacklevel=2)
        return layers
