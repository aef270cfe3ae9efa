"""Holds the first step of a model's MoE layers, on one process, against `moe_formula`: outputs and gradients.

What goes into a layer and what comes back to its output are taken from the run; all between them is the formula's.

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foundry_moe.commands.verify.formula import Formula, Routed, auxiliary_losses, experts_output, route, why_not
from foundry_moe.config import ACTIVATIONS
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops import noise


@dataclass(kw_only=True)
class _Pass:
    """A microbatch through one layer; `dy_TD` is filled in its backward pass."""

    x_TD: Tensor
    y_TD: Tensor
    factors_TD: Tensor | None
    sequences: int
    dy_TD: Tensor | None = None


class Capture:
    """Watches all MoE layers from now on, until `finish`."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = named_moe_layers(model)
        self._passes: dict[str, list[_Pass]] = {name: [] for name in self._layers}
        self._hooks = [
            layer.register_forward_hook(self._note(name), with_kwargs=True)  # type: ignore[arg-type]
            for name, layer in self._layers.items()
        ]

    def _note(self, name: str) -> Any:
        def note(layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            if not y.requires_grad:
                return  # counting ahead
            x = args[0] if args else next(iter(kwargs.values()))
            found = _Pass(
                x_TD=_whole(x.reshape(-1, layer.d_model)),
                y_TD=_whole(y.reshape(-1, layer.d_model)),
                factors_TD=_factors(layer, x.reshape(-1, layer.d_model)),
                sequences=x.shape[0] if x.dim() == 3 else 1,
            )
            self._passes[name].append(found)

            def keep(gradient: Tensor) -> None:
                found.dy_TD = _whole(gradient.reshape(-1, layer.d_model))

            y.register_hook(keep)

        return note

    def finish(self) -> dict[str, Any]:
        """By layer: a reason why it was not compared, or the largest differences and the formula's gradients.

        `output`: relative difference of outputs. `main`: gradients by parameter that the loss alone gives. `losses`: of
        each auxiliary loss, weighted, the router's gradient.
        """
        for hook in self._hooks:
            hook.remove()
        return {name: _judge(layer, self._passes[name]) for name, layer in self._layers.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu()


def _factors(layer: MoELayer, x_TD: Tensor) -> Tensor | None:
    """The random factors of the gate's input in this batch. The numbers are the run's own: they have no formula."""
    gate: Any = layer.gate
    if not hasattr(gate, "jitter"):
        return None
    context = layer.context.for_tokens(x_TD.shape[0], layer=layer.layer_index, seed=layer.config.seed)
    jitter = gate.jitter_of(gate.jitter, context, x_TD, 0)
    if jitter is None:
        return None
    return _whole(noise.jitter(torch.ones_like(x_TD, dtype=torch.float32), jitter.keys_T, jitter.amount, jitter.stream))


def _judge(layer: MoELayer, passes: list[_Pass]) -> dict[str, Any]:
    gate: Any = layer.gate
    keys = asdict(gate.config) if hasattr(gate.config, "__dataclass_fields__") else {}
    config = layer.config
    name = config.gate["name"]
    why = why_not(name, keys, capacity=config.capacity, widths=config.expert_hidden_size)
    if not why and any(seen.dy_TD is None for seen in passes):
        why = "the layer's output has no gradient"
    if why or not passes:
        return {"why": why or "the layer was not run"}
    weights = {key: _whole(tensor).requires_grad_(tensor.requires_grad) for key, tensor in layer.named_parameters()}
    bias = getattr(gate, "bias_E", None)
    formula = Formula(
        gate=name,
        keys=keys,
        num_experts=config.num_experts,
        top_k=config.top_k,
        pointwise=ACTIVATIONS[config.activation].pointwise,
        weights=weights,
        losses=layer.loss_weights,
        bias_E=None if bias is None else _whole(bias),
        by_sequence=config.balance_over == "sequence",
    )
    tokens = sum(len(seen.x_TD) for seen in passes)
    routed = [route(formula, _jittered(seen)) for seen in passes]
    counts_E = torch.stack([one.counts_TE.sum(0) for one in routed]).sum(0) if config.balance_over == "batch" else None
    output = 0.0
    main = torch.zeros((), dtype=torch.float64)
    losses: dict[str, Tensor] = {}
    one: Routed
    for seen, one in zip(passes, routed, strict=True):
        y_TD = experts_output(formula, seen.x_TD, one.weights_TE)
        output = max(output, float((y_TD - seen.y_TD).abs().max() / y_TD.abs().max()))
        assert seen.dy_TD is not None
        main = main + (y_TD * seen.dy_TD).sum()
        # a microbatch weighs as its share of the batch's tokens, as the trainer weighs its loss
        for loss, value in auxiliary_losses(formula, one, seen.sequences, counts_E).items():
            losses[loss] = losses.get(loss, 0.0) + value * len(seen.x_TD) / tokens
    trained = {key: weight for key, weight in weights.items() if weight.requires_grad}
    router = trained.get("gate.weight_ED")
    by_loss = {
        loss: torch.autograd.grad(value, router, retain_graph=True, allow_unused=True)[0]
        for loss, value in losses.items()
        if router is not None
    }
    gradients = torch.autograd.grad(main, list(trained.values()), allow_unused=True) if trained else ()
    return {
        "output": output,
        "main": {key: g for key, g in zip(trained, gradients, strict=True) if g is not None},
        "losses": {loss: gradient for loss, gradient in by_loss.items() if gradient is not None},
    }


def _jittered(seen: _Pass) -> Tensor:
    return seen.x_TD if seen.factors_TD is None else seen.x_TD * seen.factors_TD
