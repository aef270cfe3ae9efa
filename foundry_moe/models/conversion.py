"""Puts MoE layers into a model in place of its feed-forward blocks. Pure torch: no trainer, no process group."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from foundry_moe.config import ACTIVATIONS, AUTO, MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.gates.topk import TopKGate
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.models.ffn import DenseFFN, SparseFFN, expert_weights, find_ffns
from foundry_moe.models.loaded_weights import check_init

log = logging.getLogger(__name__)


def apply_dmoe(
    model: nn.Module,
    config: MoEConfig,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    *,
    loaded: bool | None = None,
) -> list[MoELayer]:
    """Replaces the feed-forward blocks of chosen layers by MoE layers, in place.

    Dense blocks become new experts (`init: random`) or copies of themselves (`init: upcycle`). A Hugging Face MoE
    block (Mixtral, OLMoE, Qwen3-MoE) keeps its weights and its meaning, and dense blocks beside it stay dense.
    A loss must go through `batch_context(model).anchor(loss)` if something scales it before its backward pass; `DMoE`
    does this.

    Args:
        model: an MPT, a Hugging Face causal LM with Llama-like blocks, or a wrapper of one.
        optimizers: their groups get the new parameters in place of the old ones.
        loaded: whether the model's weights were loaded; None: where a Hugging Face configuration names a source.

    Returns:
        The new layers, in order; empty, with a warning, where no block matched.

    Raises:
        ValueError: the model has MoE layers of ours already, or MoE blocks of a kind that is not known; a layer index
            that it does not have; an activation, bias or width that cannot be taken over; dense weights that were
            loaded and would be thrown away.
    """
    if moe_layers(model):
        raise ValueError(
            "the model has dMoE layers already: configure them once, by algorithms.dmoe or by the model's own keys "
            "(model.name: dmoe_causal_lm with model.moe)"
        )
    blocks = list(find_ffns(model))
    if not blocks:
        warnings.warn(
            f"dMoE changed nothing: {type(model).__name__} has no feed-forward block that it knows (MPT's, or "
            "Llama-like ones with gate_proj, up_proj and down_proj)",
            stacklevel=2,
        )
        return []
    config.check_layers_of(len(blocks))
    chosen = [index for index in range(len(blocks)) if config.selects(index)]
    if any(isinstance(block, SparseFFN) for _, _, block in blocks):
        chosen = _without_dense(chosen, blocks, config)
    elif chosen:
        check_init(model, config, loaded)
    context = BatchContext()
    layers = []
    for index in chosen:
        name, module, block = blocks[index]
        layer = _build_layer(name, block, config, index, len(blocks), context)
        layer.train(module.training)
        _replace_module(model, name, layer)
        _replace_parameters(module.parameters(), layer.parameters(), optimizers)
        layers.append(layer)
    if not layers:
        warnings.warn(f"dMoE changed nothing: layers ({config.layers}) selects none of {len(blocks)}", stacklevel=2)
        return []
    context.observe(model)
    _let_save(model)
    log.info("dMoE: %d of %d feed-forward blocks now have %d experts", len(layers), len(blocks), config.num_experts)
    return layers


def _let_save(model: nn.Module) -> None:
    """Makes `save_pretrained` write what `from_pretrained` reads; nothing to do for a model that has none."""
    if any(callable(getattr(module, "save_pretrained", None)) for module in model.modules()):
        from foundry_moe.models.native.saving import let_save  # brings transformers

        let_save(model)


def _without_dense(
    chosen: Sequence[int], blocks: Sequence[tuple[str, nn.Module, DenseFFN | SparseFFN]], config: MoEConfig
) -> list[int]:
    """A model with MoE blocks is dense elsewhere on purpose (Qwen3-MoE's `mlp_only_layers`): those blocks stay."""
    dense = [index for index in chosen if isinstance(blocks[index][2], DenseFFN)]
    if dense and isinstance(config.layers, tuple):
        raise ValueError(
            f"layers ({list(config.layers)}): {', '.join(map(str, dense))} of this model are dense beside MoE blocks, "
            "and stay so; leave them out"
        )
    if dense:
        log.warning("dMoE: the dense blocks %s, beside MoE blocks, stay as they are", dense)
    return [index for index in chosen if index not in dense]


def _resolve(name: str, block: DenseFFN | SparseFFN, config: MoEConfig) -> MoEConfig:
    """The configuration with `auto` read off the block, and checked against it."""
    activation = block.activation if config.activation == AUTO else config.activation
    if activation is None:
        raise ValueError(
            f"activation (auto): that of {name} is not one of {', '.join(ACTIVATIONS)}; name one of these, "
            "with init: random"
        )
    hidden = block.hidden_size if config.expert_hidden_size == AUTO else config.expert_hidden_size
    resolved = replace(config, activation=activation, expert_hidden_size=hidden)
    if isinstance(block, SparseFFN):
        return _resolve_sparse(name, block, resolved)
    if config.init == "upcycle":
        _check_upcycle(name, block, resolved)
    return resolved


def _resolve_sparse(name: str, block: SparseFFN, config: MoEConfig) -> MoEConfig:
    asked = (config.num_experts, config.top_k, config.expert_hidden_size, config.activation)
    found = (len(block.experts), block.top_k, block.hidden_size, block.activation)
    for key, ours, theirs in zip(
        ("num_experts", "top_k", "expert_hidden_size", "activation"), asked, found, strict=True
    ):
        if ours != theirs:
            raise ValueError(f"{key} ({ours}): {name} is an MoE block already, with {theirs}; its weights keep that")
    if config.gate.get("name") != "topk":
        raise ValueError(f"gate.name ({config.gate.get('name')}): {name} is an MoE block already, with gate topk")
    normalize = config.gate.get("normalize", block.normalize)
    if normalize != block.normalize:
        raise ValueError(
            f"gate.normalize ({normalize}): {name} is an MoE block already, trained with "
            f"{block.normalize}; leave it out"
        )
    return replace(config, gate={**config.gate, "normalize": block.normalize})


def _check_upcycle(name: str, block: DenseFFN, config: MoEConfig) -> None:
    if block.has_bias:
        raise ValueError(f"init (upcycle): {name} has biases and experts have none; use init: random, or no_bias: true")
    if config.expert_hidden_size != block.hidden_size:
        raise ValueError(
            f"expert_hidden_size ({config.expert_hidden_size}) must be that of {name} ({block.hidden_size}) for "
            "init: upcycle; leave it auto"
        )
    if config.activation != block.activation:
        raise ValueError(
            f"activation ({config.activation}) must be that of {name} ({block.activation}) for init: upcycle; "
            "leave it auto"
        )
    if block.gate.weight.is_meta:
        raise ValueError(f"init (upcycle): {name} has no weights yet to copy; use init_device: cpu")


def _build_layer(
    name: str,
    block: DenseFFN | SparseFFN,
    config: MoEConfig,
    index: int,
    num_layers: int,
    context: BatchContext,
) -> MoELayer:
    weight = block.router.weight if isinstance(block, SparseFFN) else block.gate.weight
    layer = MoELayer(
        block.d_model,
        _resolve(name, block, config),
        layer_index=index,
        num_layers=num_layers,
        context=context,
        returns_logits=isinstance(block, SparseFFN),
        device=weight.device,
        dtype=weight.dtype,
    )
    if not weight.is_meta:
        layer.reset_parameters()
    if isinstance(block, SparseFFN):
        _copy_sparse(layer, block)
    elif config.init == "upcycle":
        _copy_dense(layer, block)
    if layer.shared_expert is not None and (isinstance(block, SparseFFN) or config.init == "upcycle"):
        with torch.no_grad():
            layer.shared_expert.w2.weight.zero_()  # adds nothing at first: the layer computes what the block did
    return layer


@torch.no_grad()
def _copy_dense(layer: MoELayer, block: DenseFFN) -> None:
    """Every expert becomes the dense block (Komatsuzaki et al. 2022, sparse upcycling)."""
    for name, weight in expert_weights(block).items():
        layer.experts.get_parameter(name).copy_(weight.expand_as(layer.experts.get_parameter(name)))


@torch.no_grad()
def _copy_sparse(layer: MoELayer, block: SparseFFN) -> None:
    assert isinstance(layer.gate, TopKGate)
    layer.gate.weight_ED.copy_(block.router.weight)
    for e, expert in enumerate(block.experts):
        for name, weight in expert_weights(expert).items():
            layer.experts.get_parameter(name)[e].copy_(weight)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _replace_parameters(
    old: Iterable[nn.Parameter],
    new: Iterable[nn.Parameter],
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> None:
    """In the first group that held old parameters the new ones take their place; state of the old ones goes."""
    gone, new = {id(parameter): parameter for parameter in old}, list(new)
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers or []:
        arriving = new
        for group in optimizer.param_groups:
            kept = [p for p in group["params"] if id(p) not in gone]
            if len(kept) < len(group["params"]):
                group["params"], arriving = [*kept, *arriving], []
        for parameter in gone.values():
            optimizer.state.pop(parameter, None)
