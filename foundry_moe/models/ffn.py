"""Reads the dense feed-forward blocks of known models: MPT's, Hugging Face's Llama-like `*MLP`, GPT-2's and NeoX's.

Blocks are recognised by their submodules, not by their class, so that blocks of other models with the same submodules
are found too. Must not know configurations or trainers.

Shapes: D model width, F width of the block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe.config import ACTIVATIONS
from foundry_moe.schema import UserError, shorten


@dataclass(frozen=True, kw_only=True)
class DenseFFN:
    """A dense block: act(w1 x + b1) * (v1 x) or, without v1, act(w1 x + b1); then w2.

    names: `w1`, `v1` (of a GLU) and `w2` -> the name of the linear map in the block.
    transposed: the maps hold [in, out], as GPT-2's `Conv1D` does.
    activation: a name in `foundry_moe.config.ACTIVATIONS`, or None where it is not one of them.
    dropout: of the block's output; experts have none.
    act: the function of `activation`; None for a block that the user names.
    """

    module: nn.Module
    names: Mapping[str, str]
    transposed: bool
    activation: str | None
    dropout: float = 0.0
    act: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def computes_more(self) -> bool:
        """Whether the block's output for a token is not that of these parts: FalconH1 multiplies them by constants."""
        weight = self.weight("w1")
        if self.act is None or weight.is_meta:
            return False
        w1, *v1, w2 = (self.module.get_submodule(name) for name in self.names.values())
        x_11D = torch.linspace(-1, 1, self.d_model, device=weight.device, dtype=weight.dtype).view(1, 1, -1)
        training = {module: module.training for module in self.module.modules()}
        y_11D = self.module.eval()(x_11D)
        for module, mode in training.items():
            module.training = mode
        h_11F = self.act(w1(x_11D))
        expected_11D = w2(h_11F * v1[0](x_11D) if v1 else h_11F)
        return bool((y_11D - expected_11D).abs().max() > 0.01 * expected_11D.abs().max())  # bf16 rounds

    def weight(self, name: str) -> Tensor:
        return self.module.get_submodule(self.names[name]).get_parameter("weight")

    @property
    def d_model(self) -> int:
        return self.weight("w1").shape[0 if self.transposed else 1]

    @property
    def hidden_size(self) -> int:
        return self.weight("w1").shape[1 if self.transposed else 0]

    @property
    def biases(self) -> tuple[str, ...]:
        """Those of `w1`, `v1` and `w2` that have one."""
        modules = {name: self.module.get_submodule(theirs) for name, theirs in self.names.items()}
        return tuple(name for name, linear in modules.items() if getattr(linear, "bias", None) is not None)


_GLU_OF = {activation.pointwise: name for name, activation in ACTIVATIONS.items() if activation.gated}
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
_GLUS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_MLPS = (
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("fc1", "fc2"),
)
_ACTS = ("act_fn", "act", "activation_fn")


def _pointwise_name(act: Any) -> str | None:
    """The name of an activation function or module; None if experts do not support it."""
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


def _linears(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """The common class of these linear maps, `Linear` or `Conv1D`; None if they have none, or the widths differ.

    Moshi's `fc1` is twice as wide as `fc2`: it holds the two maps of a GLU.
    """
    parts: list[Any] = [getattr(module, name, None) for name in names]
    linear = all(isinstance(part, nn.Linear) for part in parts)
    if not linear and not all(type(part).__name__ == "Conv1D" and hasattr(part, "nf") for part in parts):
        return None
    *up, down = (part.weight.shape for part in parts)
    if any(shape != down[::-1] for shape in up):
        return None
    return "Linear" if linear else "Conv1D"


def _takes_one_input(module: nn.Module) -> bool:
    """False for MPT's block in transformers, which adds the residual that it gets as a second input."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) <= 1


def read_dense(module: nn.Module) -> DenseFFN | None:
    """The block's parts; None if the module is not a known dense FFN."""
    act = next((getattr(module, name) for name in _ACTS if getattr(module, name, None) is not None), None)
    if act is None or not _takes_one_input(module):
        return None
    name = _pointwise_name(act)
    for roles, families in ((("w1", "v1", "w2"), _GLUS), (("w1", "w2"), _MLPS)):
        for names in families:
            kind = _linears(module, names)
            if kind is not None:
                dropout = getattr(module, "dropout", getattr(module, "residual_dropout", None))  # Starcoder2: a number
                return DenseFFN(
                    module=module,
                    names=dict(zip(roles, names, strict=True)),
                    transposed=kind == "Conv1D",
                    activation=_GLU_OF.get(name or "") if len(roles) == 3 else name,
                    dropout=getattr(dropout, "p", dropout if isinstance(dropout, float) else 0.0),
                    act=act,
                )
    return None


def describe(name: str, module: nn.Module, parts: Mapping[str, Any] | None) -> DenseFFN:
    """A block that the user names.

    Args:
        parts: names of its linear maps under `w1`, `v1` (of a GLU) and `w2`, and `activation`; None = read from it.
    """
    if parts is None:
        found = read_dense(module)
        if found is None:
            raise UserError(
                f"blocks: {name} ({type(module).__name__}) is not a feed-forward block that is known; say what it is: "
                "{w1: ..., w2: ..., activation: gelu}, and v1 for a GLU"
            )
        return found
    names = {role: parts[role] for role in ("w1", "v1", "w2") if parts.get(role) is not None}
    if not {"w1", "w2"} <= names.keys() or not parts.keys() <= {"w1", "v1", "w2", "activation"}:
        raise UserError(
            f"blocks: {name} ({', '.join(map(str, parts))}) must have w1 and w2, and may have v1 and activation"
        )
    kind = _linears(module, tuple(names.values()))
    if kind is None:
        raise UserError(
            f"blocks: {name} ({type(module).__name__}): {', '.join(names.values())} are not all linear maps of it, "
            "of one width"
        )
    block = DenseFFN(module=module, names=names, transposed=kind == "Conv1D", activation=parts.get("activation"))
    check_nothing_else(name, block)
    return block


def check_nothing_else(name: str, block: DenseFFN) -> None:
    """Refuses a block with parameters beside its linear maps: replacing it would remove them."""
    known = tuple(f"{linear}." for linear in block.names.values())
    others = [parameter for parameter, _ in block.module.named_parameters() if not parameter.startswith(known)]
    if others:
        raise UserError(
            f"blocks: {name} ({type(block.module).__name__}) also holds {shorten(others, 4)}, which experts would "
            "replace: name a module that holds the feed-forward block alone, if need be by moving its linear maps into "
            "one"
        )


def holds_experts(module: nn.Module) -> bool:
    """Whether it is an MoE block, whose experts would be mistaken for blocks."""
    experts = getattr(module, "experts", None)
    return isinstance(experts, nn.ModuleList) and any(read_dense(expert) is not None for expert in experts)


def packs_experts(module: nn.Module) -> bool:
    """Whether it is an MoE block of transformers 5, whose experts are one module with a flag for their layout."""
    return hasattr(getattr(module, "experts", None), "is_transposed")
