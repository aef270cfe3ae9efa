"""The description of a model in a checkpoint, with which it is exported without the run's YAML.

Plain data about the computation; names and shapes of tensors are in the checkpoint anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from foundry_moe.checkpoint.errors import DamagedError
from foundry_moe.checkpoint.strict import integer, mapping, sequence, shown, text
from foundry_moe.config import MoEConfig
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.configurations import LAYERS, MOST_LAYERS, WIDTH, check_configuration, first_of
from foundry_moe.models.native.tokenizer import describe_tokenizer
from foundry_moe.schema import UserError, from_mapping

KEY = "architecture"  # of a checkpoint's `info`
# keys of `MoEConfig` that do not affect what saved weights compute
_OF_THE_RUN = ("layers", "loss", "balance_over", "freeze", "init", "backend", "memory", "mesh")
_NOT_OF_GENERATION = ("use_cache", "transformers_version", "_from_model_config")  # a trainer turns the cache off


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model with dMoE layers.

    config: `PretrainedConfig.to_dict()` of the model, with `model_type`.
    experts: keys of `MoEConfig`, resolved.
    layers: indices of the MoE layers.
    num_layers: of the model.
    prefix: of its tensors' names in a checkpoint, because the trainer's wrapper has the model as an attribute.
    tokenizer: name or folder of the run's tokenizer; empty = none.
    tokenizer_state: see `describe_tokenizer`.
    generation: keys of the source's `generation_config.json`; empty = it has none.
    source: name or folder that the model was loaded from; empty = none.
    """

    config: Mapping[str, Any]
    experts: MoEConfig
    layers: tuple[int, ...]
    num_layers: int
    prefix: str
    tokenizer: str = ""
    tokenizer_state: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    def to_info(self) -> dict[str, Any]:
        """The description as JSON data, for `from_info`."""
        experts = {key: value for key, value in asdict(self.experts).items() if key not in _OF_THE_RUN}
        plain = {**asdict(self), "config": dict(self.config), "experts": experts}
        return json.loads(json.dumps(plain, default=str))

    @staticmethod
    def from_info(info: Mapping[str, Any], where: str) -> Architecture:
        """Reads a description from a checkpoint's info, which is not trusted."""
        found = info.get(KEY)
        if found is None:
            raise UserError(
                f"{where} does not record its model, as imported weights do not: start the run from it and export the "
                "run's first checkpoint"
            )
        within = f"{where}: {KEY}"
        try:
            found = mapping(found, within, ("config", "experts", "layers", "num_layers", "prefix"))
            config = mapping(found["config"], f"{within}.config")
            num_layers = integer(found["num_layers"], f"{within}.num_layers", least=1, most=MOST_LAYERS)
            layers = sequence(found["layers"], f"{within}.layers")
            layers = [integer(layer, f"an index in {within}.layers", most=num_layers - 1) for layer in layers]
            rest: dict[str, Any] = {}
            for name in ("prefix", "tokenizer", "source"):
                rest[name] = text(found.get(name, ""), f"{within}.{name}")
            for name in ("tokenizer_state", "generation"):
                rest[name] = mapping(found.get(name, {}), f"{within}.{name}")
        except DamagedError as error:
            raise UserError(str(error)) from None
        check_configuration(config, f"{within}.config")
        return Architecture(
            config=config,
            experts=from_mapping(MoEConfig, found["experts"], f"{where}: experts"),
            layers=tuple(layers),
            num_layers=num_layers,
            **rest,
        )

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the model's sizes with those of the checkpoint's tensors, before the model is built.

        The tensors are named without `prefix`.
        """
        width, words = (first_of(self.config, keys) for keys in (WIDTH, ("vocab_size",)))
        if not any(shape == (words, width) for shape in shapes.values()):
            raise UserError(f"the checkpoint holds no embedding of {shown(words)} x {shown(width)} (vocabulary, width)")
        layers = first_of(self.config, LAYERS)
        if layers != self.num_layers or self.num_layers > len(shapes):
            raise UserError(f"{shown(layers)} layers: the checkpoint has {self.num_layers}, and {len(shapes)} tensors")
        for name, shape in shapes.items():
            if name.endswith(".experts.w1_EFD") and shape[0] != self.experts.num_experts:
                raise UserError(f"num_experts ({self.experts.num_experts}): the checkpoint has {shape[0]} in {name}")


def architecture_of(model: nn.Module) -> Architecture | None:
    """The architecture of a model, wrapped or not; None without dMoE layers or without a Hugging Face model."""
    layers = moe_layers(model)
    named: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    if not layers or not named:
        return None
    name, pretrained = named[0]
    name = name.removeprefix("module").removeprefix(".")  # DDP's
    tokenizer = getattr(model, "tokenizer", None)
    return Architecture(
        config=_plain(pretrained.config),
        experts=replace(layers[0].config, layers="all", mesh=None),
        layers=tuple(layer.layer_index for layer in layers),
        num_layers=int(getattr(pretrained.config, "n_layers", None) or pretrained.config.num_hidden_layers),
        prefix=f"{name}." if name else "",
        tokenizer=str(getattr(tokenizer, "name_or_path", "") or ""),
        tokenizer_state=describe_tokenizer(tokenizer),
        generation=_generation_of(pretrained),
        source=str(getattr(pretrained.config, "_name_or_path", "") or ""),
    )


def _generation_of(model: Any) -> dict[str, Any]:
    """The generation settings that came with the model; empty if transformers made them of its configuration."""
    settings = model.generation_config
    if settings is None or settings._from_model_config:
        return {}
    return {key: value for key, value in settings.to_diff_dict().items() if key not in _NOT_OF_GENERATION}


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    """As `to_dict`, but nested configurations, as DBRX has, keep only their own keys: their constructors refuse
    keys that all configurations have."""
    common = PretrainedConfig().to_dict().keys() | {"model_type"}
    parts = {key: value.to_dict() for key, value in vars(config).items() if isinstance(value, PretrainedConfig)}
    own = {key: {k: v for k, v in part.items() if k not in common} for key, part in parts.items()}
    # with `_attn_implementation_autoset` a model that is built from this would not choose its attention
    return {key: value for key, value in {**config.to_dict(), **own}.items() if not key.startswith("_")}
