"""Finds a model's feed-forward blocks and plans the MoE layer that replaces each: its configuration and weights.

Upcycling turns a dense FFN into experts: copies of it, or of shards of it (granular upcycling), scaled so that they add
up to it. Komatsuzaki et al. 2022 (Sparse Upcycling); He et al. 2024 (Upcycling Large Language Models into Mixture of
Experts, arXiv 2410.07524), section 4: with experts of 1/G of the width, expert i holds shard i mod G, the rows of the
gate are equal within each virtual group of G experts, so that a token's top k are whole groups, and the weights are
scaled so that the weighted sum of a token's experts equals the dense output. In the paper the scale's cube root
multiplies each matrix of a GLU. Here its square root multiplies the two that act linearly on the output, up and down
(in an MLP, the whole scale multiplies down): a model whose combine weights add up to one then computes exactly the
dense model's function.

Shapes: E experts, D model width, F width of the dense block, f expert width, G = F / f shards.
"""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from foundry_moe.config import ACTIVATIONS, AUTO, MoEConfig
from foundry_moe.layers.gates.keys import TopKKeys
from foundry_moe.layers.gates.topk import TopKGate
from foundry_moe.models.blocks import Blocks, WeightPart
from foundry_moe.models.families import FAMILIES, Family
from foundry_moe.models.ffn import DenseFFN, check_nothing_else, describe, holds_experts, packs_experts, read_dense
from foundry_moe.schema import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The MoE layer that replaces a block.

    parts: where the layer's tensors come from, with their names below the block; other tensors are random.
    gate_groups: see `MoELayer`.
    fresh_shared_expert: the experts keep weights but the shared expert is new, so its output starts at zero.
    """

    d_model: int
    config: MoEConfig
    parts: list[WeightPart] = field(default_factory=list)
    gate_groups: int = 1
    gate_output: Literal["none", "logits", "probabilities"] = "none"
    fresh_shared_expert: bool = False


def source_of(model: nn.Module, loaded: bool | None) -> str:
    """The name or path that a model's weights were loaded from; empty if they were not loaded.

    Args:
        loaded: whether they were; None: they were if a Hugging Face configuration records a source.
    """
    for module in model.modules() if loaded is not False else ():
        if not callable(getattr(module, "save_pretrained", None)):
            continue  # a part of one: MPT's rotary embedding has a configuration that raises for what it lacks
        name = getattr(getattr(module, "config", None), "_name_or_path", "")
        if isinstance(name, str) and name:
            return name
    return "the model" if loaded else ""


@dataclass(frozen=True, kw_only=True)
class FFNBlock:
    """The feed-forward block of one layer: dense, or MoE of a Hugging Face family."""

    name: str
    module: nn.Module
    layer: int
    dense: DenseFFN | None = None
    family: Family | None = None
    blocks: Blocks | None = None

    @property
    def sparse(self) -> bool:
        return self.family is not None

    def plan(self, config: MoEConfig, source: str, *, from_files: bool) -> LayerPlan:
        """The layer that replaces this block. `from_files`: weights on the meta device are read from files later."""
        if self.family is not None and self.blocks is not None:
            return _plan_sparse(self.name, self.family, self.blocks, config)
        assert self.dense is not None
        return _plan_dense(self.name, self.dense, config, source, from_files=from_files)


def find_blocks(model: nn.Module, named: Mapping[str, Mapping[str, Any] | None] | None) -> list[FFNBlock]:
    """The model's blocks in the order of layers, or only those of `named`."""
    if named is not None:
        return _find_named(model, named)
    for name, module in model.named_modules():
        if packs_experts(module):
            raise UserError(
                f"{name} ({type(module).__name__}) has experts of transformers 5, which are not replaced: compute them "
                "on the kernels of this package by foundry_moe.integrations.transformers.register() and "
                "model.set_experts_implementation('foundry_moe'), see docs/how-to/transformers.md"
            )
    return _find_sparse(model) or _find_dense(model)


def _find_dense(model: nn.Module) -> list[FFNBlock]:
    found: list[FFNBlock] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        dense = read_dense(module)
        if dense is not None:
            check_nothing_else(name, dense)
            inside = (*inside, f"{name}.")
            found.append(FFNBlock(name=name, module=module, layer=len(found), dense=dense))
        elif holds_experts(module):
            raise UserError(
                f"{name} ({type(module).__name__}) is an MoE block of a model whose family is not known: see "
                "docs/how-to/hugging_face.md for those that can be taken over"
            )
    return found


def _find_sparse(model: nn.Module) -> list[FFNBlock]:
    """All blocks, dense ones included, of a model of a known MoE family; empty for other models."""
    for prefix, module in model.named_modules():
        family = FAMILIES.get(_model_type(module))
        if family is None:
            continue
        place = family.block.partition(".")[2]  # below the base model
        if place.format(layer=0) not in dict(module.named_modules()):
            continue
        blocks = family.read(module.config)
        if not blocks.layers:
            raise UserError(
                f"all layers of this {family.name} model are dense by its configuration, so it has no experts to take "
                "over; correct the configuration, or load the dense model as its own model_type"
            )
        found = []
        for layer in range(blocks.num_layers):
            name = f"{prefix}.{place}".strip(".").format(layer=layer)
            sparse = {"family": family, "blocks": blocks} if layer in blocks.layers else {}
            found.append(FFNBlock(name=name, module=model.get_submodule(name), layer=layer, **sparse))  # type: ignore[arg-type]
        return found
    return []


def _model_type(module: nn.Module) -> str:
    """`model_type` of a Hugging Face model's configuration; empty for other modules."""
    try:
        found = getattr(getattr(module, "config", None), "model_type", "")
    except KeyError:  # MPT's blocks hold a configuration that raises errors of its own
        return ""
    return found if isinstance(found, str) else ""


def _find_named(model: nn.Module, named: Mapping[str, Mapping[str, Any] | None]) -> list[FFNBlock]:
    names = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, Mapping[str, Any] | None] = {}
    for pattern, parts in named.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise UserError(f"blocks: {pattern} names no module of {type(model).__name__}; {nearest(pattern, names)}")
        chosen |= dict.fromkeys(matching, parts)
    ordered = [name for name in names if name in chosen]
    return [
        FFNBlock(name=name, module=module, layer=layer, dense=describe(name, module, chosen[name]))
        for layer, name in enumerate(ordered)
        for module in [model.get_submodule(name)]
    ]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _plan_dense(name: str, block: DenseFFN, config: MoEConfig, source: str, *, from_files: bool) -> LayerPlan:
    activation = block.activation if config.activation == AUTO else config.activation
    if activation is None:
        raise UserError(
            f"activation (auto): that of {name} is not one of {', '.join(ACTIVATIONS)}; name one of these, "
            "with init: random"
        )
    hidden = block.hidden_size if config.expert_hidden_size == AUTO else config.expert_hidden_size
    config = replace(config, activation=activation, expert_hidden_size=hidden)
    if block.dropout:
        warnings.warn(f"{name} drops {block.dropout} of its output in training, which experts do not", stacklevel=4)
    if config.init == "random" or (config.init == AUTO and not source):
        return LayerPlan(d_model=block.d_model, config=replace(config, bias=config.bias is True))
    try:
        shards = check_upcycle(name, block, config)
    except UserError as error:
        if config.init != AUTO:
            raise
        raise UserError(
            f"init (auto): the feed-forward weights of {source} would not be used, since they cannot be copied: "
            f"{error}; or write init: random to draw experts anew (model.pretrained: false, if nothing is loaded)"
        ) from None
    if block.weight("w1").is_meta and not from_files:
        raise UserError(f"init (upcycle): {name} has no weights yet to copy; use init_device: cpu")
    config = replace(config, bias=bool(block.biases) or config.bias is True)
    return LayerPlan(
        d_model=block.d_model,
        config=config,
        parts=upcycled_parts(block, config, shards),
        gate_groups=shards,
        fresh_shared_expert=bool(config.shared_expert_hidden_size),
    )


def _plan_sparse(name: str, family: Family, blocks: Blocks, config: MoEConfig) -> LayerPlan:
    """Fills in the values that the block's weights determine, and checks the user's keys against it."""
    settings = blocks.settings()
    gate = _gate_of(name, blocks, config)
    fresh = bool(config.shared_expert_hidden_size) and not blocks.shared_expert_hidden_size
    for key in ("num_experts", "top_k", "expert_hidden_size", "activation", "shared_expert_hidden_size"):
        ours, theirs = getattr(config, key), settings[key]
        if ours != theirs and ours != AUTO and not (key == "shared_expert_hidden_size" and (fresh or ours == 0)):
            raise UserError(f"{key} ({ours}): {name} is an MoE block already, with {theirs}, which cannot change")
    if config.bias is True:
        raise UserError(f"bias (true): {name} is an MoE block already, without biases")
    if fresh:
        shared = {"shared_expert_hidden_size": config.shared_expert_hidden_size}
        settings |= {**shared, "shared_expert_gate": config.shared_expert_gate}
    return LayerPlan(
        d_model=blocks.d_model,
        config=replace(config, **{**settings, "gate": gate, "bias": False}),
        parts=family.parts(blocks),
        gate_output=blocks.gate_output,
        fresh_shared_expert=fresh,
    )


def _gate_of(name: str, blocks: Blocks, config: MoEConfig) -> dict[str, Any]:
    """The block's gate, with the user's keys that affect training only."""
    if config.gate.get("name") != "topk":
        raise UserError(f"gate.name ({config.gate.get('name')}): {name} is an MoE block already, with gate topk")
    keys = {key: value for key, value in blocks.gate.items() if key != "name"}
    trained = TopKKeys(**keys)
    for key, value in config.gate.items():
        if key in ("name", "noise", *TopKGate.MAY_CHANGE) or not hasattr(trained, key):
            continue  # the gate itself reports an unknown key
        if value != getattr(trained, key):
            raise UserError(
                f"gate.{key} ({value}): {name} is an MoE block already, trained with {getattr(trained, key)}; "
                "leave it out"
            )
    return {**blocks.gate, **config.gate}


def check_upcycle(name: str, block: DenseFFN, config: MoEConfig) -> int:
    """Returns G, how many shards the block is cut into. `config` has its width and activation resolved."""
    if config.activation != block.activation:
        raise UserError(
            f"activation ({config.activation}) must be that of {name} ({block.activation}) for init: upcycle; "
            "leave it auto"
        )
    if block.computes_more():
        raise UserError(
            f"init (upcycle): {name} ({type(block.module).__name__}) computes more than its linear maps and "
            "activation, which its copies would not; use init: random"
        )
    shards = config.shards_of(block.hidden_size, name)
    if block.biases and config.bias is False:
        raise UserError(f"bias (false): {name} has biases, which init: upcycle copies; leave bias out, or write true")
    return shards


def weight_scale(config: MoEConfig, shards: int) -> float:
    """The factor that makes the weighted sum of a token's experts equal to the dense block's output.

    Exact if the combine weights add up to one; otherwise for an untrained gate, as in He et al. 2024.
    """
    gate = config.gate
    scale = float(gate.get("scale", 1.0))
    if gate["name"] == "switch":
        return float(config.num_experts)
    if gate["name"] != "topk":
        return 1.0
    if gate.get("normalize", True):
        total = scale
    elif gate.get("score", "softmax") == "sigmoid":
        total = scale * config.top_k * 0.5  # the mean of sigmoid(x w) while w is small
    else:
        total = scale * config.top_k / config.num_experts
    return shards / total


def upcycled_parts(block: DenseFFN, config: MoEConfig, shards: int) -> list[WeightPart]:
    """The parts of the experts' tensors, in terms of the block's tensors."""
    d_model, dense, width = block.d_model, block.hidden_size, block.hidden_size // shards
    total = weight_scale(config, shards)
    gated = "v1" in block.names
    scale = {"w1": 1.0, "v1": math.sqrt(total), "w2": math.sqrt(total) if gated else total}
    parts = []
    for expert in range(config.num_experts):
        row = expert % shards * width
        for role, theirs in block.names.items():
            down = role == "w2"
            whole, shape, begin = ((d_model, dense), (d_model, width), (0, row)) if down else (
                (dense, d_model), (width, d_model), (row, 0))  # fmt: skip
            parts.append(
                WeightPart(
                    ours=f"experts.{role}_{'EDF' if down else 'EFD'}",
                    expert=expert,
                    shape=shape,
                    theirs=f"{theirs}.weight",
                    their_shape=whole[::-1] if block.transposed else whole,
                    begin=begin[::-1] if block.transposed else begin,
                    transposed=block.transposed,
                    scale=scale[role],
                )
            )
            if role in block.biases:
                parts.append(
                    WeightPart(
                        ours=f"experts.{role}_bias_{'ED' if down else 'EF'}",
                        expert=expert,
                        shape=shape[:1],
                        theirs=f"{theirs}.bias",
                        their_shape=whole[:1],
                        begin=(0,) if down else (row,),
                        # every expert of a token adds it, so each shard has its share
                        scale=total / shards if down else scale[role],
                    )
                )
    return parts
