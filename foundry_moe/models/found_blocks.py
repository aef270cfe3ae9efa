"""A model's feed-forward blocks, dense or of experts, and what each becomes: a configuration and where tensors lie."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from foundry_moe.config import ACTIVATIONS, AUTO, MoEConfig
from foundry_moe.layers.gates.keys import TopKKeys
from foundry_moe.layers.gates.topk import TopKGate
from foundry_moe.models.families import FAMILIES, Blocks, Family, Part, family_of
from foundry_moe.models.ffn import DenseFFN, describe, find_ffns
from foundry_moe.models.loaded_weights import Origin
from foundry_moe.models.upcycling import check_upcycle, upcycled_parts
from foundry_moe.schema import nearest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a block becomes.

    parts: where tensors of the layer come from, names of theirs below the block; others are drawn.
    router_groups: see `MoELayer`.
    fresh_shared_expert: beside weights that are kept, a shared expert is new, and adds nothing at first.
    """

    d_model: int
    config: MoEConfig
    parts: list[Part] = field(default_factory=list)
    router_groups: int = 1
    router_output: Literal["none", "logits", "probabilities"] = "none"
    fresh_shared_expert: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A feed-forward block: the FFN of a layer, by its name in the model."""

    name: str
    module: nn.Module
    layer: int
    dense: DenseFFN | None = None
    family: Family | None = None
    blocks: Blocks | None = None

    @property
    def sparse(self) -> bool:
        return self.family is not None

    def plan(self, config: MoEConfig, origin: Origin) -> Plan:
        """Raises ValueError where the configuration and the block do not go together."""
        if self.family is not None and self.blocks is not None:
            return _plan_sparse(self.name, self.family, self.blocks, config)
        assert self.dense is not None
        return _plan_dense(self.name, self.dense, config, origin)


def find_blocks(model: nn.Module, named: Mapping[str, Mapping[str, Any] | None] | None) -> list[Found]:
    """The model's blocks in the order of layers; with `named`, those alone.

    Raises:
        ValueError: a model of experts whose family is not known, or a name that is not there.
    """
    if named is not None:
        return _find_named(model, named)
    sparse = _find_sparse(model)
    if sparse:
        return sparse
    return [
        Found(name=name, module=block.module, layer=layer, dense=block)
        for layer, (name, block) in enumerate(_known_dense(model))
    ]


def _known_dense(model: nn.Module) -> list[tuple[str, DenseFFN]]:
    try:
        return list(find_ffns(model))
    except ValueError:
        for module in model.modules():
            if _model_type(module):
                family_of(module.config)  # says what stands in the way of this one
        raise


def _find_sparse(model: nn.Module) -> list[Found]:
    """The layers of a model of a family of ours, with its dense blocks in their places; none for other models."""
    for prefix, module in model.named_modules():
        family = FAMILIES.get(_model_type(module))
        if family is None:
            continue
        blocks = family.read(module.config)
        place = family.block if _has(module, family.block_name(0)) else family.block.partition(".")[2]
        if not _has(module, place.format(layer=0)):
            continue
        found = []
        for layer in range(blocks.num_layers):
            name = f"{prefix}.{place}".strip(".").format(layer=layer)
            sparse = {"family": family, "blocks": blocks} if layer in blocks.layers else {}
            found.append(Found(name=name, module=model.get_submodule(name), layer=layer, **sparse))  # type: ignore[arg-type]
        return found
    return []


def _model_type(module: nn.Module) -> str:
    """Of a Hugging Face model's configuration; empty for other modules."""
    try:
        found = getattr(getattr(module, "config", None), "model_type", "")
    except KeyError:  # MPT's blocks hold a configuration that raises errors of its own
        return ""
    return found if isinstance(found, str) else ""


def _has(module: nn.Module, name: str) -> bool:
    try:
        return module.get_submodule(name) is not None
    except AttributeError:
        return False


def _find_named(model: nn.Module, named: Mapping[str, Mapping[str, Any] | None]) -> list[Found]:
    names = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, Mapping[str, Any] | None] = {}
    for pattern, parts in named.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise ValueError(f"blocks: {pattern} names no module of {type(model).__name__}; {nearest(pattern, names)}")
        chosen |= dict.fromkeys(matching, parts)
    ordered = [name for name in names if name in chosen]
    return [
        Found(name=name, module=module, layer=layer, dense=describe(name, module, chosen[name]))
        for layer, name in enumerate(ordered)
        for module in [model.get_submodule(name)]
    ]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _plan_dense(name: str, block: DenseFFN, config: MoEConfig, origin: Origin) -> Plan:
    activation = block.activation if config.activation == AUTO else config.activation
    if activation is None:
        raise ValueError(
            f"activation (auto): that of {name} is not one of {', '.join(ACTIVATIONS)}; name one of these, "
            "with init: random"
        )
    hidden = block.hidden_size if config.expert_hidden_size == AUTO else config.expert_hidden_size
    config = replace(config, activation=activation, expert_hidden_size=hidden)
    if block.dropout:
        warnings.warn(f"{name} drops {block.dropout} of its output in training, which experts do not", stacklevel=4)
    if origin.init == "random":
        return Plan(d_model=block.d_model, config=replace(config, bias=config.bias is True))
    try:
        shards = check_upcycle(name, block, config)
    except ValueError as error:
        raise ValueError(origin.explain(str(error))) from None
    if block.weight("w1").is_meta and not origin.from_files:
        raise ValueError(f"init (upcycle): {name} has no weights yet to copy; use init_device: cpu")
    config = replace(config, bias=bool(block.biases) or config.bias is True)
    return Plan(
        d_model=block.d_model,
        config=config,
        parts=upcycled_parts(block, config, shards),
        router_groups=shards,
        fresh_shared_expert=bool(config.shared_expert_hidden_size),
    )


def _plan_sparse(name: str, family: Family, blocks: Blocks, config: MoEConfig) -> Plan:
    """The configuration with what the block fixes filled in, and checked against it."""
    settings = blocks.settings()
    gate = _gate_of(name, blocks, config)
    fresh = bool(config.shared_expert_hidden_size) and not blocks.shared_expert_hidden_size
    for key in ("num_experts", "top_k", "expert_hidden_size", "activation", "shared_expert_hidden_size"):
        ours, theirs = getattr(config, key), settings[key]
        if ours != theirs and ours != AUTO and not (key == "shared_expert_hidden_size" and (fresh or ours == 0)):
            raise ValueError(f"{key} ({ours}): {name} is an MoE block already, with {theirs}; its weights keep that")
    if config.bias is True:
        raise ValueError(f"bias (true): {name} is an MoE block already, without biases")
    if fresh:
        shared = {"shared_expert_hidden_size": config.shared_expert_hidden_size}
        settings |= {**shared, "shared_expert_gate": config.shared_expert_gate}
    return Plan(
        d_model=blocks.d_model,
        config=replace(config, **{**settings, "gate": gate, "bias": False}),
        parts=family.parts(blocks),
        router_output=blocks.router_output,
        fresh_shared_expert=fresh,
    )


def _gate_of(name: str, blocks: Blocks, config: MoEConfig) -> dict[str, Any]:
    """The block's gate, with what a user may set of it: what steers training alone."""
    if config.gate.get("name") != "topk":
        raise ValueError(f"gate.name ({config.gate.get('name')}): {name} is an MoE block already, with gate topk")
    keys = {key: value for key, value in blocks.gate.items() if key != "name"}
    trained = TopKKeys(**keys)
    for key, value in config.gate.items():
        if key == "name" or key in TopKGate.MAY_CHANGE or not hasattr(trained, key):
            continue  # of an unknown key the gate says so itself
        if value != getattr(trained, key):
            raise ValueError(
                f"gate.{key} ({value}): {name} is an MoE block already, trained with {getattr(trained, key)}; "
                "leave it out"
            )
    return {**blocks.gate, **config.gate}
