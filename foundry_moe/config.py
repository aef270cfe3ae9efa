"""The user's configuration, and all checks on it that need no model and no process group.

One class, `MoEConfig`, serves both ways of using the package: `algorithms.dmoe` and `model.moe`.
This module imports neither torch nor Composer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from foundry_moe.schema import fits, form, from_mapping, one_of

AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An expert's nonlinearity: `pointwise` is a name in `foundry_moe.ops.POINTWISE`; `gated` makes it a GLU."""

    pointwise: str
    gated: bool


ACTIVATIONS: Mapping[str, Activation] = {
    "swiglu": Activation(pointwise="silu", gated=True),
    "geglu": Activation(pointwise="gelu", gated=True),
    "geglu_tanh": Activation(pointwise="gelu_tanh", gated=True),
    "reglu": Activation(pointwise="relu", gated=True),
    "silu": Activation(pointwise="silu", gated=False),
    "gelu": Activation(pointwise="gelu", gated=False),
    "gelu_tanh": Activation(pointwise="gelu_tanh", gated=False),
    "relu": Activation(pointwise="relu", gated=False),
    "relu2": Activation(pointwise="relu2", gated=False),
}
BACKENDS = ("auto", "blocksparse", "grouped", "reference")
INITS = ("auto", "random", "upcycle")
MEMORY = ("save", "recompute")
DROPS = ("position", "weight")
FREEZABLE = ("router",)
BALANCE_OVER = ("sequence", "rank", "group", "microbatch", "batch")
ALL_TO_ALL = ("auto", "flat", "hierarchical")
REDUCE = ("microbatch", "batch")
COMPILE = ("none", "blocks", "auto")
MOST_EXPERTS = 4096  # of a layer: the most that the kernels sort choices by


# `init_device: meta` without `mesh`: Composer then draws parts, and experts are drawn by layer
META_NEEDS_MESH = (
    "init_device (meta): experts are drawn from meta on a mesh only; add mesh: {expert: 1, shard: auto} to the MoE "
    "keys, or use init_device: cpu"
)
UPCYCLE_NEEDS_WEIGHTS = (
    "model.moe.init (upcycle): a model that is built with experts has no trained FFN to copy; use init: random, or "
    "algorithms.dmoe on a pretrained model (model.name: hf_causal_lm)"
)


def refuse_hot_experts_of_several_widths(hot_experts: int) -> None:
    """Raises ValueError where experts of several widths would have copies."""
    if hot_experts:
        raise ValueError(f"mesh.hot_experts ({hot_experts}) wants experts of one width, but expert_hidden_size gives "
                         "several: use hot_experts: 0")  # fmt: skip


def can_cut_rows(rows: int, *, shard: int, expert: int) -> bool:
    """Whether `shard` can cut matrices of experts that have so many rows.

    With experts divided over ranks it cuts the rows of each matrix, which must divide evenly: FSDP2 would pad them.
    With `expert: 1` it may cut the experts instead.
    """
    return expert == 1 or rows % shard == 0


def refuse_other_parallelism(*, tensor_parallel: bool, fsdp_version: str) -> None:
    """Refuses what MoE layers do not go with.

    Raises:
        ValueError: tensor parallelism, or FSDP1.
    """
    if tensor_parallel:
        raise ValueError("tp_config: tensor parallelism does not go with dMoE layers; remove it and use mesh.expert")
    if fsdp_version != "2":
        raise ValueError(
            f"FSDP_VERSION ({fsdp_version}): dMoE layers need FSDP2; set FSDP_VERSION=2 in the environment"
        )


def check_batch_size(batch_size: object, gpus: int) -> int:
    """The batch size, once every GPU gets as many of its sequences.

    Raises:
        ValueError: no whole number, or no multiple of the number of GPUs.
    """
    if not isinstance(batch_size, int) or batch_size % gpus:
        raise ValueError(f"global_train_batch_size ({batch_size}) must be a multiple of the number of GPUs ({gpus})")
    return batch_size


def check_compilation(run: Mapping[str, Any]) -> None:
    """Refuses to compile a whole model that FSDP2 wraps.

    Raises:
        ValueError: several processes, and `compile_config`.
    """
    if run.get("compile_config") is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "compile_config compiles the whole model at once, which fails on one that FSDP2 has wrapped: remove it "
            "and set mesh.compile: blocks"
        )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The 3-D device mesh: `expert` x `shard` x `replicate` = world size; `auto` takes what is left.

    expert: over how many GPUs the experts of a layer are divided. Divides `num_experts`.
    shard: over how many GPUs each parameter is sharded, as in ZeRO-3.
    replicate: how many copies of the sharded model there are, as in HSDP.
    all_to_all: flat | hierarchical | auto (hierarchical where `expert` spans nodes).
    buffer: how many times an even share of rows a GPU receives and computes at once; a more skewed batch goes in
        rounds, sent and computed again in the backward pass but for the first: memory does not follow the router.
    hot_experts: the number of a layer's most loaded experts, by the loads of the last steps, that have copies on the
        GPUs of their group with the fewest rows; copies compute a part of their tokens. 0 = none.
    reduce: when gradients are summed over `shard`: after each microbatch, or once a batch, which holds them unsharded
        until then. Over `replicate` they are summed once a batch.
    compile: none | blocks (`torch.compile` of each transformer block; the trainer's `compile_config` is for one GPU) |
        auto (blocks on GPUs, where the model has any).
    spares: let GPUs wait that the mesh or the batch size has no place for, in place of an error: after a restart on
        fewer nodes.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {
        "chunks": "sending tokens in parts gained nothing over NVLink; delete the key",
    }

    expert: int | Literal["auto"] = 1
    shard: int | Literal["auto"] = AUTO
    replicate: int | Literal["auto"] = 1
    all_to_all: str = AUTO
    buffer: float = 2.0
    hot_experts: int = 0
    reduce: str = "microbatch"
    compile: str = "none"
    spares: bool = False

    def __post_init__(self) -> None:
        for name in ("expert", "shard", "replicate"):
            value = getattr(self, name)
            if value != AUTO and value < 1:
                raise ValueError(f"mesh.{name} ({value}) must be 1 or more, or auto")
        if not self.buffer >= 1:
            raise ValueError(f"mesh.buffer ({self.buffer}) must be 1 or more: times the even share of rows")
        if self.hot_experts < 0:
            raise ValueError(f"mesh.hot_experts ({self.hot_experts}) must be 0 or more")
        if self.all_to_all == "direct":
            raise ValueError(
                "mesh.all_to_all: direct was removed, since it was no faster than flat: use all_to_all: auto"
            )
        one_of("mesh.all_to_all", self.all_to_all, ALL_TO_ALL)
        one_of("mesh.reduce", self.reduce, REDUCE)
        one_of("mesh.compile", self.compile, COMPILE)
        if self.spares and self.shard == AUTO:
            raise ValueError("mesh.spares needs mesh.shard as a number: auto takes all GPUs, and leaves none to wait")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Everything a user says of the MoE layers. The README's table of keys is made from this class.

    num_experts: experts in a layer.
    top_k: experts a token goes to.
    expert_hidden_size: width of one expert, or a list of one width for each expert; auto = that of the FFN it replaces.
    activation: swiglu | geglu | geglu_tanh | reglu | silu | gelu | gelu_tanh | relu | relu2; auto = that of the FFN it
        replaces.
    bias: whether experts have biases; auto = those of the FFN that they are copied from, else none.
    layers: all | {every: n} | a list of layer indices.
    gate: `{name: ..., ...}`; the other keys belong to the gate.
    loss: weights of auxiliary losses by name, for example `{balance: 0.01, z: 0.001}`; auto = what the gate wants,
        `{balance: 0.01}` for most.
    balance_over: the tokens whose loads the balance loss sees: sequence (each by itself, packed documents too) | rank |
        group (ranks that share experts) | microbatch (of all ranks) | batch (all microbatches of a step too, which
        takes one more forward pass if there are several).
    freeze: parts of the layers that stay as they are: [router], its weights and balancing bias. Its losses still reach
        what comes before it.
    init: random | upcycle (each expert starts as a copy of the dense FFN, or of a shard of it) | auto (upcycle where
        the dense FFN was loaded, else random). The weights of an MoE block are always kept.
    init_std: standard deviation of random weights; projections back to the residual stream have it
        divided by sqrt(2 * number of layers), as in GPT-2 (Radford et al. 2019, section 2.3).
    shared_expert_hidden_size: width of an expert that every token passes through; 0 = none.
    shared_expert_gate: multiply the shared expert's output by sigmoid(x w), as Qwen2-MoE does.
    capacity: null = dropless; a number = capacity factor with token dropping; dynamic = the smallest that drops none.
    drop: which choices go without a place: those behind in order (position) or those that weigh least (weight).
    backend: auto | blocksparse | grouped | reference.
    memory: save | recompute the activation in the backward pass (blocksparse).
    seed: weights depend on (seed, layer, expert) alone.
    mesh: see MeshConfig; absent = data parallelism as Composer does it.
    """

    num_experts: int
    top_k: int = 2
    expert_hidden_size: int | tuple[int, ...] | Literal["auto"] = field(
        default=AUTO, metadata=form("a whole number, auto, or a list of one width for each expert such as [512, 1024]")
    )
    activation: str = AUTO
    bias: bool | Literal["auto"] = AUTO
    layers: str | dict | tuple[int, ...] = field(
        default="all", metadata=form("all, {every: n} or a list of indices such as [1, 3, 5]")
    )
    gate: dict[str, Any] = field(
        default_factory=lambda: {"name": "topk"}, metadata=form("a mapping such as {name: topk}")
    )
    loss: dict[str, float] | Literal["auto"] = field(
        default=AUTO, metadata=form("auto, or a mapping such as {balance: 0.01, z: 0.001}")
    )
    balance_over: str = "microbatch"
    freeze: tuple[str, ...] = field(default=(), metadata=form("a list of parts such as [router]"))
    init: str = AUTO
    init_std: float = 0.02
    shared_expert_hidden_size: int = 0
    shared_expert_gate: bool = False
    capacity: float | Literal["dynamic"] | None = None
    drop: str = "position"
    backend: str = "auto"
    memory: str = "save"
    seed: int = 17
    mesh: dict[str, Any] | None = field(default=None, metadata=form("a mapping such as {expert: 8, shard: auto}"))

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"num_experts ({self.num_experts}) must be 1 or more")
        if self.num_experts > MOST_EXPERTS:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be {MOST_EXPERTS} or less: choices are sorted by it"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must be between 1 and num_experts ({self.num_experts}): "
                f"lower top_k or raise num_experts"
            )
        self._check_widths()
        if self.shared_expert_hidden_size < 0:
            raise ValueError(f"shared_expert_hidden_size ({self.shared_expert_hidden_size}) must be 0 or more")
        if self.shared_expert_gate and not self.shared_expert_hidden_size:
            raise ValueError("shared_expert_gate (true): there is no shared expert; give shared_expert_hidden_size")
        one_of("activation", self.activation, [AUTO, *ACTIVATIONS])
        one_of("backend", self.backend, BACKENDS)
        one_of("init", self.init, INITS)
        one_of("memory", self.memory, MEMORY)
        for part in self.freeze:
            one_of("freeze", part, FREEZABLE)
        if self.init_std <= 0:
            raise ValueError(f"init_std ({self.init_std}) must be above 0")
        self._check_layers()
        self._check_gate_and_loss()
        if isinstance(self.capacity, int | float) and self.capacity <= 0:
            raise ValueError(f"capacity ({self.capacity}) must be above 0, dynamic, or null for dropless")
        one_of("drop", self.drop, DROPS)
        if self.drop != "position" and not isinstance(self.capacity, int | float):
            raise ValueError(
                f"drop ({self.drop}): capacity ({self.capacity}) drops nothing; give it a number such as 1.25"
            )
        hot_experts = 0 if self.mesh_config is None else self.mesh_config.hot_experts
        if hot_experts > self.num_experts:
            raise ValueError(f"mesh.hot_experts ({hot_experts}) must be num_experts ({self.num_experts}) at most")
        if isinstance(self.expert_hidden_size, tuple):
            refuse_hot_experts_of_several_widths(hot_experts)

    def _check_widths(self) -> None:
        if isinstance(self.expert_hidden_size, list):
            object.__setattr__(self, "expert_hidden_size", tuple(self.expert_hidden_size))
        widths = self.expert_hidden_size
        if isinstance(widths, int) and widths < 1:
            raise ValueError(f"expert_hidden_size ({widths}) must be 1 or more, or auto")
        if not isinstance(widths, tuple):
            return
        if len(widths) != self.num_experts:
            raise ValueError(
                f"expert_hidden_size has {len(widths)} widths, but num_experts is {self.num_experts}: give one width "
                "for each expert, or one number for all"
            )
        if min(widths) < 1:
            raise ValueError(f"expert_hidden_size ({list(widths)}): every width must be 1 or more")
        if len(set(widths)) == 1:
            object.__setattr__(self, "expert_hidden_size", widths[0])
            return
        for key, value, allowed in (
            ("backend", self.backend, ("auto", "blocksparse", "reference")),
            ("capacity", self.capacity, (None,)),
            ("init", self.init, (AUTO, "random")),
            ("bias", self.bias, (AUTO, False)),
        ):
            if value not in allowed:
                use = " or ".join("null" if word is None else str(word).lower() for word in allowed)
                raise ValueError(f"{key} ({value}) wants experts of one width, but expert_hidden_size gives several: "
                                 f"use {key}: {use}")  # fmt: skip

    def _check_layers(self) -> None:
        layers = self.layers
        if isinstance(layers, str) and layers != "all":
            raise ValueError(f"layers ({layers!r}) must be all, {{every: n}} or a list of indices such as [1, 3, 5]")
        if isinstance(layers, dict) and (
            set(layers) != {"every"} or not isinstance(layers["every"], int) or layers["every"] < 1
        ):
            raise ValueError(f"layers ({layers!r}) must be {{every: n}} with n a whole number of 1 or more")
        if isinstance(layers, tuple) and (not layers or len(set(layers)) != len(layers) or min(layers) < 0):
            raise ValueError(f"layers ({list(layers)}) must be distinct indices from 0 up, at least one")

    def _check_gate_and_loss(self) -> None:
        if not isinstance(self.gate.get("name"), str):
            raise ValueError(f"gate ({self.gate!r}) must name a gate: gate: {{name: topk}}")
        one_of("balance_over", self.balance_over, BALANCE_OVER)
        for name, weight in {} if self.loss == AUTO else self.loss.items():
            if not fits(weight, float) or weight < 0:
                raise ValueError(f"loss.{name} ({weight!r}) must be a number of 0 or more")

    @property
    def mesh_config(self) -> MeshConfig | None:
        """The parsed `mesh`, or None where the user gave none."""
        return None if self.mesh is None else from_mapping(MeshConfig, self.mesh, "mesh")

    def check_layers_of(self, num_layers: int) -> None:
        """Raises ValueError where `layers` names one that a model of `num_layers` does not have."""
        if isinstance(self.layers, tuple) and max(self.layers) >= num_layers:
            raise ValueError(f"layers ({list(self.layers)}): the model has {num_layers}, so use 0 to {num_layers - 1}")

    def selects(self, layer_index: int) -> bool:
        """Whether the layer at this index gets experts. `{every: 2}` takes layers 1, 3, 5, ... as GShard does."""
        if isinstance(self.layers, dict):
            return (layer_index + 1) % self.layers["every"] == 0
        return self.layers == "all" or layer_index in self.layers
