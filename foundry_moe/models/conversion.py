"""Puts MoE layers into a model in place of its feed-forward blocks. Pure torch: no trainer, no process group."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.models.adapters import follow_peft
from foundry_moe.models.block_plans import FFNBlock, LayerPlan, find_blocks, source_of
from foundry_moe.models.pretrained import by_tensor, fill
from foundry_moe.schema import UserError

log = logging.getLogger(__name__)


def apply_dmoe(
    model: nn.Module,
    config: MoEConfig,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    *,
    loaded: bool | None = None,
    blocks: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> list[MoELayer]:
    """Replaces the feed-forward blocks of chosen layers by MoE layers, in place.

    Dense blocks become new experts (`init: random`), or copies or shards of themselves (`init: upcycle`). A Hugging
    Face MoE block keeps its weights and its meaning, and dense blocks beside it stay dense; which families can be
    taken over is in docs/how-to/hugging_face.md. Layers on the meta device record where their weights come from in
    `MoELayer.sources`. A loss that the model does not return as `loss` must go through
    `batch_context(model).track_scale(loss)` if something scales it before its backward pass; `DMoE` does this.

    Args:
        model: an MPT, a Hugging Face causal LM, or a wrapper of one; with `blocks`, any model.
        optimizers: their groups get the new parameters in place of the old ones.
        loaded: whether the model's weights were loaded; None: where a Hugging Face configuration names a source.
        blocks: feed-forward blocks by name, a `*` for any one part: `{"layers.*.mlp": None}`; where it is not one that
            is known, its linear maps: `{"layers.*.ff": {"w1": "lin_in", "w2": "lin_out", "activation": "gelu"}}`.

    Returns:
        The new layers, in order; at least one.

    Raises:
        ValueError: no block matched; the model has MoE layers of ours already, or MoE blocks of a kind that is not
            known; a layer index that it does not have; an activation, bias or width that cannot be taken over; dense
            weights that were loaded and cannot be copied.
    """
    if moe_layers(model):
        raise UserError(
            "the model has dMoE layers already: configure them once, by algorithms.dmoe or by the model's own keys "
            "(model.name: dmoe_causal_lm with model.moe)"
        )
    found = find_blocks(model, blocks)
    if not found:
        raise UserError(
            f"dMoE: {type(model).__name__} has no feed-forward block of a known kind (MPT's, or Llama-like ones with "
            "gate_proj, up_proj and down_proj); in Python, name its blocks by apply_dmoe(..., blocks=...)"
        )
    config.check_layers_of(len(found))
    chosen = _without_dense([block for index, block in enumerate(found) if config.selects(index)], found, config)
    if not chosen:
        raise UserError(f"dMoE: layers ({config.layers}) selects none of the {len(found)} feed-forward blocks")
    _report_own_training(model, chosen[0])
    source = source_of(model, loaded)
    if source and config.init == "random" and not chosen[0].sparse:
        warnings.warn(
            f"init (random): experts are drawn anew, and the feed-forward weights of {source} are not used",
            stacklevel=2,
        )
    context = BatchContext()
    layers = []
    for block in chosen:
        layer = _build_layer(block, block.plan(config, source, from_files=bool(loaded)), len(found), context)
        layer.train(block.module.training)
        parent, _, child = block.name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
        _replace_parameters(block.module.parameters(), layer, optimizers)
        layers.append(layer)
    context.observe(model)
    if config.lora is not None:
        follow_peft(model)
    if any(callable(getattr(module, "save_pretrained", None)) for module in model.modules()):
        # imports transformers, which a plain torch model does not need
        from foundry_moe.models.native.saving import let_save

        let_save(model)
    log.info("dMoE: %d of %d feed-forward blocks now have %d experts", len(layers), len(found), config.num_experts)
    return layers


def _report_own_training(model: nn.Module, block: FFNBlock) -> None:
    """Turns off a Hugging Face MoE model's own balance loss, and logs what of its training differs now."""
    for module in model.modules() if block.family is not None else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
            log.warning(
                "dMoE: output_router_logits (true) of the model's configuration is off, with which Hugging Face adds "
                "a balance loss of its own (router_aux_loss_coef) to the loss; loss.balance sets that of these layers"
            )
    if block.family is not None and block.blocks is not None and "jitter" in block.blocks.gate:
        jitter = block.blocks.gate["jitter"]
        log.warning("dMoE: %s (%s) of the model's configuration is gate.jitter here", block.family.jitter, jitter)


def _without_dense(chosen: list[FFNBlock], found: Sequence[FFNBlock], config: MoEConfig) -> list[FFNBlock]:
    """Leaves out dense blocks of an MoE model: they are dense by design (Qwen3-MoE's `mlp_only_layers`)."""
    if not any(block.sparse for block in found):
        return chosen
    dense = [block.layer for block in chosen if not block.sparse]
    if dense and isinstance(config.layers, tuple):
        raise UserError(
            f"layers ({list(config.layers)}): {', '.join(map(str, dense))} of this model are dense beside MoE blocks, "
            "and stay so; leave them out"
        )
    if dense:
        log.warning("dMoE: the dense blocks %s, beside MoE blocks, stay as they are", dense)
    return [block for block in chosen if block.sparse]


def _build_layer(block: FFNBlock, plan: LayerPlan, num_layers: int, context: BatchContext) -> MoELayer:
    weight = next(block.module.parameters())
    layer = MoELayer(
        plan.d_model,
        plan.config,
        layer_index=block.layer,
        num_layers=num_layers,
        context=context,
        gate_output=plan.gate_output,
        device=weight.device,
        dtype=weight.dtype,
    )
    layer.gate_groups = plan.gate_groups
    layer.sources = plan.parts
    layer.zero_init_shared = plan.fresh_shared_expert
    if weight.is_meta:
        return layer
    layer.reset_gate()  # again: the attributes above change both
    layer.reset_shared_expert()
    theirs: dict[str, Tensor] = dict(block.module.state_dict())
    ours = layer.state_dict()
    for name, parts in by_tensor(plan.parts).items():
        fill(ours[name], (0,) * ours[name].dim(), parts, theirs.__getitem__)
    return layer


def _replace_parameters(
    old: Iterable[nn.Parameter], layer: MoELayer, optimizers: Optimizer | Sequence[Optimizer] | None
) -> None:
    """Puts the layer's parameters into the first group that held old ones, and drops the old parameters' state.

    Biases go into the first group that held old biases, if one did: such a group has no weight decay.
    """
    gone = {id(parameter): parameter for parameter in old}
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers or []:
        held: dict[bool, dict[str, Any]] = {}  # by whether it is for biases
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in gone:
                    held.setdefault(parameter.dim() == 1, group)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        for name, parameter in layer.named_parameters() if held else ():
            is_bias = "bias" in name.rpartition(".")[2]
            held.get(is_bias, next(iter(held.values())))["params"].append(parameter)
        for parameter in gone.values():
            optimizer.state.pop(parameter, None)
