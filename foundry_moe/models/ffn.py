"""Reads the feed-forward blocks of known models: MPT's, Hugging Face's Llama-like `*MLP`, and its MoE blocks.

Blocks are told by their parts, not by their class, so that look-alikes of other models are found too.
Knows nothing of configuration or trainers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class DenseFFN:
    """A dense block: act(gate x) * (up x) or, with `up` None, act(gate x); then `down`.

    activation: a name in `foundry_moe.config.ACTIVATIONS`, or None where it is not one of them.
    """

    gate: nn.Linear
    up: nn.Linear | None
    down: nn.Linear
    activation: str | None

    @property
    def d_model(self) -> int:
        return self.gate.in_features

    @property
    def hidden_size(self) -> int:
        return self.gate.out_features

    @property
    def has_bias(self) -> bool:
        return any(linear is not None and linear.bias is not None for linear in (self.gate, self.up, self.down))


@dataclass(frozen=True, kw_only=True)
class SparseFFN:
    """A Hugging Face MoE block with a linear router and experts without biases: Mixtral's, OLMoE's, Qwen3-MoE's."""

    router: nn.Linear
    experts: list[DenseFFN]
    top_k: int
    normalize: bool

    @property
    def d_model(self) -> int:
        return self.router.in_features

    @property
    def hidden_size(self) -> int:
        return self.experts[0].hidden_size

    @property
    def activation(self) -> str | None:
        return self.experts[0].activation


# What blocks have that compute something else than a softmax over x W and its top k: Qwen2-MoE's, PhiMoE's sparsemixer
_OTHER_MEANING = ("shared_expert", "router_jitter_noise")

_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu"}
_MODULES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def _pointwise_name(act: Any) -> str | None:
    """The name of an activation function or module, None where it is not one we compute."""
    keywords: dict[str, Any] = {}
    if isinstance(act, partial):
        act, keywords = act.func, dict(act.keywords)
    if isinstance(act, nn.Module):
        name = _MODULES.get(type(act).__name__)
        keywords = {"approximate": getattr(act, "approximate", "none")} if isinstance(act, nn.GELU) else {}
    else:
        name = _FUNCTIONS.get(act)
    if name == "gelu" and keywords.get("approximate", "none") == "tanh":
        return "gelu_tanh"
    return name


def _linears(module: nn.Module, *names: str) -> tuple[nn.Linear, ...] | None:
    parts = tuple(getattr(module, name, None) for name in names)
    return parts if all(isinstance(part, nn.Linear) for part in parts) else None  # type: ignore[return-value]


def read_dense(module: nn.Module) -> DenseFFN | None:
    """The block's parts, or None where it is not a dense FFN that we know."""
    act = getattr(module, "act_fn", getattr(module, "act", None))
    for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        gated = _linears(module, *names)
        if gated is not None and act is not None:
            return DenseFFN(
                gate=gated[0], up=gated[1], down=gated[2], activation=_GATED.get(_pointwise_name(act) or "")
            )
    plain = _linears(module, "up_proj", "down_proj")
    if plain is not None and act is not None:
        return DenseFFN(gate=plain[0], up=None, down=plain[1], activation=_pointwise_name(act))
    return None


def read_sparse(module: nn.Module) -> SparseFFN | None:
    """The parts of a Hugging Face MoE block, or None where it is not one that we know."""
    router, experts = getattr(module, "gate", None), getattr(module, "experts", None)
    top_k = getattr(module, "top_k", None)
    if not isinstance(router, nn.Linear) or not isinstance(experts, nn.ModuleList) or not isinstance(top_k, int):
        return None
    dense = [read_dense(expert) for expert in experts]
    if not dense or router.bias is not None or any(d is None or d.has_bias for d in dense):
        return None
    if any(hasattr(module, part) for part in _OTHER_MEANING):
        return None
    # Mixtral always normalises and has no switch for it
    normalize = bool(getattr(module, "norm_topk_prob", True))
    return SparseFFN(router=router, experts=[d for d in dense if d], top_k=top_k, normalize=normalize)


def find_ffns(model: nn.Module) -> Iterator[tuple[str, nn.Module, DenseFFN | SparseFFN]]:
    """(name, module, parts) of each feed-forward block, in the order of layers; experts of a block are not blocks.

    Raises:
        ValueError: an MoE block of another kind, whose experts would be taken for blocks.
    """
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside) if inside else False:
            continue
        block = read_sparse(module) or read_dense(module)
        if block is None and _holds_experts(module):
            raise ValueError(
                f"{name} ({type(module).__name__}) is an MoE block already, with a router, a shared expert or biases "
                "that a dMoE layer does not have: blocks like Mixtral's, OLMoE's and Qwen3-MoE's can be taken over"
            )
        if block is not None:
            inside = (*inside, f"{name}.")
            yield name, module, block


def _holds_experts(module: nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    return isinstance(experts, nn.ModuleList) and any(read_dense(expert) is not None for expert in experts)


def expert_weights(ffn: DenseFFN) -> dict[str, Tensor]:
    """A dense block's weights under the names of `foundry_moe.layers.experts.Experts`, one expert's worth."""
    weights = {"w1_EFD": ffn.gate.weight, "w2_EDF": ffn.down.weight}
    return weights if ffn.up is None else {**weights, "v1_EFD": ffn.up.weight}
