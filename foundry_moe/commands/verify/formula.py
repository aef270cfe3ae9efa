"""The MoE layer as dense fp64 formulas, and the comparison of a run's first step with them.

The formulas share no code with layers, gates and operators: every expert computes every token, and choices are a mask.
On a CPU the layer under test computes with `ops.unfused`, so the formulas do not. `why_not` names the gates without a
formula. `Capture` takes a layer's input and its output's gradient from the run.

Shapes: T tokens, D model width, F expert width, E experts, G groups, M experts of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe.commands.verify.rows import difference
from foundry_moe.config import ACTIVATIONS, MoEConfig
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.ops import noise

_POINTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
_GATES = ("topk", "switch")  # tests/layers/gates compares the others with their papers' formulas


class Routed(NamedTuple):
    """probs_TE: for balance losses. chosen_TE: 0 or 1. weights_TE: 0 if not chosen."""

    logits_TE: Tensor
    probs_TE: Tensor
    chosen_TE: Tensor
    weights_TE: Tensor

    def at(self, tokens: Tensor) -> Routed:
        """Those of some tokens, by mask or index."""
        return Routed(*(values_TE[tokens] for values_TE in self))


def why_not(config: MoEConfig, keys: Mapping[str, Any]) -> str:
    """Why a layer has no formula here; empty where it has one. `keys`: of its gate, with defaults."""
    if config.gate["name"] not in _GATES:
        return f"gate {config.gate['name']} has no independent formula"
    if keys.get("noise"):
        return "gate.noise draws random numbers"
    if config.capacity is not None:
        return f"capacity ({config.capacity}) drops choices, which the formula does not"
    if isinstance(config.expert_hidden_size, tuple):
        return "experts of several widths have no formula"
    if config.lora_config is not None and config.lora_config.dropout:
        return "lora.dropout draws random numbers"
    return ""


def _best(scores_TX: Tensor, k: int) -> Tensor:
    """Mask of the k largest of each row."""
    chosen = scores_TX.topk(k, dim=-1).indices
    return torch.zeros_like(scores_TX).scatter(-1, chosen, 1.0)


class Formula:
    """One layer: its weights in fp64 under its own names (`gate.weight_ED`, `experts.w1_EFD`, ...), and what they give.

    keys: of its gate, with defaults.
    """

    def __init__(self, layer: MoELayer, keys: Mapping[str, Any]) -> None:
        self.config, self.keys, self.loss_weights = layer.config, keys, layer.loss_weights
        self.weights = {name: _whole(w).requires_grad_(w.requires_grad) for name, w in layer.named_parameters()}
        bias: Any = getattr(layer.gate, "bias_E", None)  # of the choice, not of the weight
        self.bias_E = None if bias is None else _whole(bias)

    def route(self, x_TD: Tensor) -> Routed:
        """The gate: from (jittered) tokens to weights of all experts."""
        keys, config = self.keys, self.config
        logits_TE = x_TD @ self.weights["gate.weight_ED"].T
        softmax_TE = (logits_TE - logits_TE.logsumexp(-1, keepdim=True)).exp()
        scores_TE = 1 / (1 + (-logits_TE).exp()) if keys.get("score") == "sigmoid" else softmax_TE
        probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        ranked_TE = scores_TE.detach()
        if self.bias_E is not None:
            ranked_TE = ranked_TE + self.bias_E
        groups, limit = int(keys.get("groups", 1)), int(keys.get("group_limit", 0))
        if 0 < limit < groups:
            by_group_TGM = ranked_TE.view(len(x_TD), groups, -1)
            worth_TG = by_group_TGM.sort(-1, descending=True).values[..., :2].sum(-1)
            inside_TE = _best(worth_TG, limit).repeat_interleave(config.num_experts // groups, dim=1)
            ranked_TE = ranked_TE.masked_fill(inside_TE == 0, -torch.inf)
        chosen_TE = _best(ranked_TE, config.top_k)
        weights_TE = scores_TE * chosen_TE
        if config.gate["name"] == "topk" and keys.get("normalize", True):
            weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
        return Routed(logits_TE, probs_TE, chosen_TE, weights_TE * float(keys.get("scale", 1.0)))

    def output(self, x_TD: Tensor, weights_TE: Tensor) -> Tensor:
        """sum over e of weight[t, e] * FFN_e(x[t]), and the shared expert's output."""
        pointwise, weights = _POINTWISE[ACTIVATIONS[self.config.activation].pointwise], self.weights
        lora = self.config.lora_config

        def product(subscripts: str, x: Tensor, name: str, inputs: str, outputs: str) -> Tensor:
            weight = weights[f"experts.{name}_E{outputs}{inputs}"]
            a, b = (weights.get(f"experts.{name}_{factor}L") for factor in (f"A_E{inputs}", f"B_E{outputs}"))
            if lora is not None and a is not None and b is not None:
                weight = weight + lora.scale * b @ a.mT
            bias = weights.get(f"experts.{name}_bias_E{outputs}")
            return torch.einsum(subscripts, x, weight) + (0.0 if bias is None else bias[:, None])

        h_ETF = pointwise(product("td,efd->etf", x_TD, "w1", "D", "F"))
        if "experts.v1_EFD" in weights:
            h_ETF = h_ETF * product("td,efd->etf", x_TD, "v1", "D", "F")
        y_TD = torch.einsum("te,etd->td", weights_TE, product("etf,edf->etd", h_ETF, "w2", "F", "D"))
        if "shared_expert.w1.weight" in weights:
            h_TF = pointwise(x_TD @ weights["shared_expert.w1.weight"].T)
            if "shared_expert.v1.weight" in weights:
                h_TF = h_TF * (x_TD @ weights["shared_expert.v1.weight"].T)
            shared_TD = h_TF @ weights["shared_expert.w2.weight"].T
            if "shared_expert.gate.weight" in weights:
                shared_TD = shared_TD * torch.sigmoid(x_TD @ weights["shared_expert.gate.weight"].T)
            y_TD = y_TD + shared_TD
        return y_TD

    def auxiliary_losses(self, routed: Routed, lengths: list[int]) -> dict[str, Tensor]:
        """The configured losses of real tokens, times their weights. `lengths`: tokens of each sequence."""
        probs_TE, chosen_TE = routed.probs_TE, routed.chosen_TE
        parts = [(probs_TE, chosen_TE)]
        if self.config.balance_over == "sequence":
            parts = list(zip(probs_TE.split(lengths), chosen_TE.split(lengths), strict=True))
        shares = [(chosen_SE.sum(0) / chosen_SE.sum() * probs_SE.sum(0)).sum() for probs_SE, chosen_SE in parts]
        importance_E = routed.weights_TE.sum(0)
        losses = {
            "balance": self.config.num_experts * torch.stack(shares).sum() / len(probs_TE),
            "z": routed.logits_TE.logsumexp(-1).square().mean(),
            "importance": importance_E.var(correction=0) / importance_E.mean().square(),
        }
        return {name: losses[name] * weight for name, weight in self.loss_weights.items()}


@dataclass(kw_only=True)
class _Pass:
    """A microbatch through one layer: tokens, the gate's input, output, and its gradient from the backward pass.

    mask_NS: True for real tokens, by sequence.
    """

    x_TD: Tensor
    gate_TD: Tensor
    y_TD: Tensor
    mask_NS: Tensor
    dy_TD: Tensor | None = None


class Capture:
    """Records the passes of all MoE layers until `finish`."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = named_moe_layers(model)
        self._passes: dict[str, list[_Pass]] = {name: [] for name in self._layers}
        self._hooks = [
            layer.register_forward_hook(partial(self._note, name), with_kwargs=True)  # type: ignore[arg-type]
            for name, layer in self._layers.items()
        ]

    def _note(self, name: str, layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if not y.requires_grad:
            return  # counting ahead
        x = args[0] if args else next(iter(kwargs.values()))
        x_TD, y_TD = (_whole(tensor.reshape(-1, layer.d_model)) for tensor in (x, y))
        mask_T = layer.context.for_tokens(len(x_TD)).mask_T
        mask_T = torch.ones(len(x_TD)).bool() if mask_T is None else mask_T.cpu()
        mask_NS = mask_T.view(x.shape[0] if x.dim() == 3 else 1, -1)
        found = _Pass(x_TD=x_TD, gate_TD=_jittered(layer, x_TD, x.device), y_TD=y_TD, mask_NS=mask_NS)
        self._passes[name].append(found)

        def keep(gradient: Tensor) -> None:
            found.dy_TD = _whole(gradient.reshape(-1, layer.d_model))

        y.register_hook(keep)

    def finish(self) -> dict[str, Any]:
        """By layer: the reason why it was not compared, or differences and the formula's gradients.

        `output`: relative difference of outputs. `main`: gradients of the main loss by parameter. `losses`: the
        gate's gradient of each weighted auxiliary loss.
        """
        for hook in self._hooks:
            hook.remove()
        return {name: _judge(layer, _last_attempts(layer, self._passes[name])) for name, layer in self._layers.items()}


def _last_attempts(layer: MoELayer, passes: list[_Pass]) -> list[_Pass]:
    """Without passes that were repeated: those have no gradient."""
    expected = layer.dispatcher.expected
    if expected is None or not expected.repeated:
        return passes
    return [seen for seen in passes if seen.dy_TD is not None] or passes


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu()


def _jittered(layer: MoELayer, x_TD: Tensor, device: torch.device) -> Tensor:
    """The gate's input in this batch: tokens times the run's own random factors, which have no formula."""
    gate: Any = layer.gate
    ones_TD = torch.ones_like(x_TD, dtype=torch.float32, device=device)
    context = layer.context.for_tokens(x_TD.shape[0], layer=layer.layer_index, seed=layer.config.seed)
    if not hasattr(gate, "jitter") or (jitter := gate.input_jitter(ones_TD, context)).keys_T is None:
        return x_TD
    return x_TD * _whole(noise.jitter(ones_TD, *jitter))


def _judge(layer: MoELayer, passes: list[_Pass]) -> dict[str, Any]:
    gate: Any = layer.gate
    keys = asdict(gate.config) if hasattr(gate.config, "__dataclass_fields__") else {}
    config = layer.config
    why = why_not(config, keys)
    if not why and any(seen.dy_TD is None for seen in passes):
        why = "the layer's output has no gradient"
    if why or not passes:
        return {"why": why or "the layer was not run"}
    formula = Formula(layer, keys)
    routed = [formula.route(seen.gate_TD) for seen in passes]
    output = 0.0
    main = torch.zeros((), dtype=torch.float64)
    for seen, one in zip(passes, routed, strict=True):
        y_TD = formula.output(seen.x_TD, one.weights_TE)
        output = max(output, difference(seen.y_TD, y_TD.detach()))
        assert seen.dy_TD is not None
        main = main + (y_TD * seen.dy_TD).sum()
    # losses are of a microbatch, which weighs as its share of the real tokens, or of the whole batch
    masks = [seen.mask_NS for seen in passes]
    parts = [(one.at(mask.flatten()), mask.sum(1).tolist()) for one, mask in zip(routed, masks, strict=True)]
    if config.balance_over == "batch":
        together = Routed(*map(torch.cat, zip(*(one for one, _ in parts), strict=True)))
        parts = [(together, [length for _, lengths in parts for length in lengths])]
    tokens = sum(sum(lengths) for _, lengths in parts)
    losses: dict[str, Tensor] = {}
    for one, lengths in parts:
        for loss, value in formula.auxiliary_losses(one, lengths).items():
            losses[loss] = losses.get(loss, 0.0) + value * sum(lengths) / tokens
    trained = {key: weight for key, weight in formula.weights.items() if weight.requires_grad}
    weight_ED = trained.get("gate.weight_ED")
    by_loss = {
        loss: torch.autograd.grad(value, weight_ED, retain_graph=True, allow_unused=True)[0]
        for loss, value in losses.items()
        if weight_ED is not None
    }
    gradients = torch.autograd.grad(main, list(trained.values()), allow_unused=True) if trained else ()
    return {
        "output": output,
        "main": {key: g for key, g in zip(trained, gradients, strict=True) if g is not None},
        "losses": {loss: gradient for loss, gradient in by_loss.items() if gradient is not None},
    }
