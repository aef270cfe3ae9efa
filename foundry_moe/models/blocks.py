"""MoE blocks of a model as data, and where the tensors of one block are in another format. Without torch.

Shapes: E experts, D model width, F expert width, S width of a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foundry_moe.config import MoEConfig
from foundry_moe.schema import UserError

_OF_CONFIG = (  # fields of `Blocks` that are keys of `MoEConfig` with the same meaning
    *("num_experts", "top_k", "expert_hidden_size", "activation", "gate"),
    *("shared_expert_hidden_size", "shared_expert_gate"),
)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The configuration of a model's sparse blocks, which are all alike. Names are those of `MoEConfig`.

    gate: keys of the gate, at least those that differ from its defaults.
    layers: indices of the sparse layers; the others are dense, and stay so.
    gate_output: the second result of a block.
    """

    d_model: int
    num_experts: int
    top_k: int
    expert_hidden_size: int
    activation: str
    gate: Mapping[str, Any] = field(default_factory=lambda: {"name": "topk"})
    shared_expert_hidden_size: int = 0
    shared_expert_gate: bool = False
    layers: tuple[int, ...]
    num_layers: int
    gate_output: Literal["logits", "probabilities", "none"] = "logits"

    def settings(self) -> dict[str, Any]:
        """The blocks as keys of `MoEConfig`, without `layers`."""
        return {key: getattr(self, key) for key in _OF_CONFIG}


def blocks_of(config: MoEConfig, *, d_model: int, layers: tuple[int, ...], num_layers: int) -> Blocks:
    """A model of ours as `Blocks`, for `Family.write`. `config` has its width and activation resolved."""
    if isinstance(config.expert_hidden_size, tuple):
        raise UserError(
            f"expert_hidden_size ({list(config.expert_hidden_size)}): no Hugging Face model has experts of different "
            "widths; use one width"
        )
    if config.bias is True:
        raise UserError("bias (true): experts of Hugging Face's families have no biases; use false")
    if config.capacity is not None:
        raise UserError(f"capacity ({config.capacity}) drops tokens, which no Hugging Face model does; use null")
    same = {key: getattr(config, key) for key in _OF_CONFIG}
    return Blocks(**same, d_model=d_model, layers=layers, num_layers=num_layers)


def gate_keys(blocks: Blocks) -> dict[str, Any]:
    """The gate's name and all keys of gate `topk` that affect evaluation, with defaults."""
    name = blocks.gate.get("name")
    keys = {"score": "softmax", "normalize": True, "scale": 1.0, "bias_balance": False, "groups": 1, "group_limit": 0}
    if name == "switch":  # in evaluation the top one of softmax scores, unnormalised
        return {**keys, "name": "topk", "normalize": False}
    if name != "topk":
        raise UserError(f"gate.name ({name}): no Hugging Face family has this gate; use topk")
    found: dict[str, Any] = {"name": "topk", **keys, **{key: blocks.gate[key] for key in keys if key in blocks.gate}}
    limited = 0 < found["group_limit"] < found["groups"]
    return found if limited else {**found, "groups": 1, "group_limit": 0}


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """A tensor of our layer, or one expert's matrix of it, and the box of a tensor of theirs that holds it.

    Names are those below the block: `experts.w1_EFD`, `experts.3.w1.weight`.

    expert: whose matrix of `ours`; None = rows of `ours` from `first_row` on.
    shape: of this part of ours, [F, D] for an expert's `experts.w1_EFD`.
    begin: where it begins in their tensor; additional leading dimensions of theirs have size one.
    transposed: theirs holds the transpose of ours.
    fp32: kept in fp32, independent of the model's dtype.
    scale: ours is theirs times this; 1 except for experts that are copies of a dense FFN.
    """

    ours: str
    expert: int | None = None
    first_row: int = 0
    shape: tuple[int, ...]
    theirs: str
    their_shape: tuple[int, ...]
    begin: tuple[int, ...]
    transposed: bool = False
    fp32: bool = False
    scale: float = 1.0

    @property
    def of_ours(self) -> int | tuple[slice, ...]:
        """The index of this part in our tensor."""
        if self.expert is not None:
            return self.expert
        begin = (self.first_row,) + (0,) * len(self.shape)
        return tuple(slice(a, a + n) for a, n in zip(begin, self.shape, strict=False))

    def box(self, begin: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """The indices of their tensor that hold `sizes` elements from `begin` of this part; all of it by default.

        These elements, reshaped, are those of ours, or of its transpose with `transposed`.
        """
        begin = (0,) * len(self.shape) if begin is None else begin
        sizes = self.shape if sizes is None else sizes
        if self.transposed:
            begin, sizes = begin[::-1], sizes[::-1]
        more = len(self.their_shape) - len(self.shape)
        begin, sizes = (0,) * more + begin, (1,) * more + sizes
        return tuple(slice(a + b, a + b + n) for a, b, n in zip(self.begin, begin, sizes, strict=True))


def whole(ours: str, theirs: str, *shape: int, fp32: bool = False) -> WeightPart:
    """The same tensor under another name."""
    return WeightPart(ours=ours, shape=shape, theirs=theirs, their_shape=shape, begin=(0,) * len(shape), fp32=fp32)


# of `w1`, `v1` or `w2`, the expert and the matrix's shape: its fields of `WeightPart`
Place = Callable[[Blocks, str, int, tuple[int, int]], Mapping[str, Any]]


def of_experts(blocks: Blocks, place: Place) -> list[WeightPart]:
    """The parts of all experts' matrices."""
    wide, tall = (blocks.expert_hidden_size, blocks.d_model), (blocks.d_model, blocks.expert_hidden_size)
    return [
        WeightPart(ours=f"experts.{matrix}_{axes}", expert=e, shape=shape, **place(blocks, matrix, e, shape))
        for e in range(blocks.num_experts)
        for matrix, axes, shape in (("w1", "EFD", wide), ("v1", "EFD", wide), ("w2", "EDF", tall))
    ]


_LLAMAS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


def each_expert(
    blocks: Blocks, matrix: str, e: int, shape: tuple[int, int], names: Mapping[str, str] = _LLAMAS
) -> dict[str, Any]:
    """A tensor for each matrix of each expert, as in `experts.3.gate_proj.weight`."""
    return {"theirs": f"experts.{e}.{names[matrix]}.weight", "their_shape": shape, "begin": (0, 0)}


def gate_above_up(blocks: Blocks, matrix: str, e: int, shape: tuple[int, int]) -> dict[str, Any]:
    """A tensor holds the gate and up projections of all experts, another one their down projections."""
    rows, columns = shape
    if matrix == "w2":
        return {"theirs": "output_linear.weight", "their_shape": (blocks.num_experts, *shape), "begin": (e, 0, 0)}
    begin = (e, rows if matrix == "v1" else 0, 0)
    return {"theirs": "input_linear.weight", "their_shape": (blocks.num_experts, 2 * rows, columns), "begin": begin}


def side_by_side(blocks: Blocks, matrix: str, e: int, shape: tuple[int, int]) -> dict[str, Any]:
    """A tensor [E * F, D] for each of the three matrices holds those of all experts; down is transposed."""
    width = blocks.expert_hidden_size
    where = {"their_shape": (blocks.num_experts * width, blocks.d_model), "begin": (e * width, 0)}
    return {"theirs": f"experts.mlp.{matrix}", "transposed": matrix == "w2", **where}


def shared_expert(blocks: Blocks, prefix: str) -> list[WeightPart]:
    """The parts of a shared expert, a Llama-like MLP below `prefix`; empty if its width is 0."""
    width, d_model = blocks.shared_expert_hidden_size, blocks.d_model
    if not width:
        return []
    return [
        whole("shared_expert.w1.weight", f"{prefix}.gate_proj.weight", width, d_model),
        whole("shared_expert.v1.weight", f"{prefix}.up_proj.weight", width, d_model),
        whole("shared_expert.w2.weight", f"{prefix}.down_proj.weight", d_model, width),
    ]
