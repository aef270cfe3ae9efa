"""The user's configuration, with all checks that need no model and no process group.

`MoEConfig` has the keys of `algorithms.dmoe` and of `model.moe`. This module imports neither torch nor Composer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foundry_moe.schema import (
    UserError,
    caught,
    fits,
    form,
    from_mapping,
    one_of,
    raise_mistakes,
    suggests_keys,
    yaml_value,
)

AUTO: Literal["auto"] = "auto"
RESHARD = "reshard_after_forward"  # of fsdp_config; may be auto in a run with a mesh


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An expert's nonlinearity.

    pointwise: a name in `foundry_moe.ops.POINTWISE`.
    gated: makes it a GLU.
    hugging_face: names in transformers' ACT2FN of `pointwise`, where a family's experts have it; the first is written.
    """

    pointwise: str
    gated: bool
    hugging_face: tuple[str, ...] = ()


ACTIVATIONS: Mapping[str, Activation] = {
    "swiglu": Activation(pointwise="silu", gated=True, hugging_face=("silu", "swish")),
    "geglu": Activation(pointwise="gelu", gated=True, hugging_face=("gelu",)),
    "geglu_tanh": Activation(pointwise="gelu_tanh", gated=True, hugging_face=("gelu_pytorch_tanh", "gelu_new")),
    "reglu": Activation(pointwise="relu", gated=True, hugging_face=("relu",)),
    "silu": Activation(pointwise="silu", gated=False),
    "gelu": Activation(pointwise="gelu", gated=False),
    "gelu_tanh": Activation(pointwise="gelu_tanh", gated=False),
    "relu": Activation(pointwise="relu", gated=False),
    "relu2": Activation(pointwise="relu2", gated=False),
}
MATRICES = ("w1", "v1", "w2")
MOST_EXPERTS = 4096  # of a layer; the kernels sort no more


# without `mesh`, Composer initialises each rank's part, but experts' weights depend on (seed, layer, expert)
META_NEEDS_MESH = (
    "init_device (meta): initialising experts from meta needs a mesh; add mesh: {expert: 1, shard: auto} to the MoE "
    "keys, or use init_device: cpu"
)
UPCYCLE_NEEDS_WEIGHTS = (
    "model.moe.init (upcycle): a model that is built with experts has no trained FFN to copy; use init: random, or "
    "algorithms.dmoe on a pretrained model (model.name: hf_causal_lm)"
)

MESH_NEEDS_PLAN = (
    "mesh (auto) is chosen by `foundry-moe train`: start the run with it, or give the widths that `foundry-moe plan` "
    "shows"
)


def can_cut_rows(rows: int, *, shard: int, expert: int) -> bool:
    """Whether `shard` divides the rows of an expert's matrix evenly; if not, FSDP2 would pad them.

    With `expert: 1`, FSDP2 shards the dimension of experts instead.
    """
    return expert == 1 or rows % shard == 0


def check_rows(sizes: Mapping[str, object], *, shard: int, expert: int) -> None:
    """Raises ValueError for a size by its key, d_model or expert_hidden_size, that `shard` would not cut evenly."""
    for key, size in sizes.items():
        if isinstance(size, int) and not can_cut_rows(size, shard=shard, expert=expert):
            raise UserError(f"mesh.shard ({shard}) must divide {key} ({size}), the rows of experts' matrices")


def refuse_other_parallelism(*, tensor_parallel: bool, fsdp_version: str) -> None:
    """Raises ValueError for tensor parallelism and FSDP1, which dMoE layers do not support."""
    if tensor_parallel:
        raise UserError("tp_config: dMoE layers do not support tensor parallelism; remove it and use mesh.expert")
    if fsdp_version != "2":
        raise UserError(
            f"FSDP_VERSION ({fsdp_version}): dMoE layers need FSDP2; set FSDP_VERSION=2 in the environment, or pass "
            "parallelism_config={'fsdp': FSDP2Config()} to Trainer"
        )


def check_batch_size(batch_size: object, gpus: int) -> int:
    """The batch size. Raises ValueError unless it is a multiple of the number of GPUs."""
    if not isinstance(batch_size, int) or batch_size % gpus:
        raise UserError(f"global_train_batch_size ({batch_size}) must be a multiple of the number of GPUs ({gpus})")
    return batch_size


def check_compilation(run: Mapping[str, Any]) -> None:
    """Raises ValueError for `compile_config` in a run with experts."""
    if run.get("compile_config") is not None:
        raise UserError(
            "compile_config compiles the whole model, which fails on models with dMoE layers: remove it and set "
            "mesh.compile: blocks"
        )


@suggests_keys
@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The 3-D device mesh: `expert` x `shard` x `replicate` = world size; `auto` takes the remaining factor.

    Attributes:
        expert: GPUs that the experts of a layer are divided over; divides `num_experts`.
        shard: GPUs that each parameter is sharded over, as in ZeRO-3.
        replicate: copies of the sharded model, as in HSDP.
        all_to_all: flat | hierarchical | auto (hierarchical if `expert` spans several whole nodes of more than one
            GPU).
        buffer: rows that a GPU receives and computes at once, as a multiple of an even share. A more skewed batch is
            processed in rounds, all but the first of which are sent and computed again in the backward pass.
        compile: none | blocks (`torch.compile` of each transformer block; not the trainer's `compile_config`) | auto
            (blocks on GPUs, if the model has any).
        sizes: exact | expected. exact: in each layer the host waits for the counts that ranks exchange. expected:
            messages are sized by the forward passes before, with a margin, and a pass that does not fit is repeated
            with exact sizes. No effect with `expert: 1` and in `foundry_moe.parallelize`.
        spares: GPUs that do not fit the mesh or the batch size idle instead of raising an error, for a restart on fewer
            nodes.
    """

    expert: int | Literal["auto"] = 1
    shard: int | Literal["auto"] = AUTO
    replicate: int | Literal["auto"] = 1
    all_to_all: str = AUTO
    buffer: float = 2.0
    compile: str = "none"
    sizes: str = "exact"
    spares: bool = False

    def __post_init__(self) -> None:
        raise_mistakes(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        for name in ("expert", "shard", "replicate"):
            value = getattr(self, name)
            if value != AUTO and value < 1:
                yield f"mesh.{name} ({value}) must be 1 or more, or auto"
        if not self.buffer >= 1:
            yield f"mesh.buffer ({self.buffer}) must be 1 or more: times the even share of rows"
        yield from caught(one_of, "mesh.all_to_all", self.all_to_all, (AUTO, "flat", "hierarchical"))
        yield from caught(one_of, "mesh.compile", self.compile, ("none", "blocks", AUTO))
        yield from caught(one_of, "mesh.sizes", self.sizes, ("exact", "expected"))
        if self.spares and self.shard == AUTO:
            yield "mesh.spares needs a number in mesh.shard: auto uses all GPUs"

    def compiles(self, *, on_gpu: bool) -> bool:
        """Whether blocks are to be compiled, if the model has any."""
        return self.compile == "blocks" or (self.compile == AUTO and on_gpu)


@suggests_keys
@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters of the experts (Hu et al. 2021): W x + scale * B A x, with W frozen and A and B trained in fp32.

    Attributes:
        r: rank of an adapter, the columns of B and rows of A.
        alpha: scale = alpha / r.
        dropout: probability that an element of an adapter's input is zero in training; above 0 it needs
            `mesh.expert: 1`.
        targets: matrices with an adapter, a list of w1 (gate projection, or the first of an MLP), v1 (up) and w2
            (down); auto = all of them. The others are frozen too.
        rslora: scale = alpha / sqrt(r) (Kalajdzievski 2023).
        start: a PEFT folder, such as `export --adapter` writes, whose adapters the run starts from. Of
            `algorithms.dmoe`; in Python call `foundry_moe.models.adapters.load_adapter(model, folder)`.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["auto"] = field(
        default=AUTO, metadata=form("auto, or a list of matrices such as [w1, v1, w2]")
    )
    rslora: bool = False
    start: str | None = field(default=None, metadata=form("a folder with adapter_model.safetensors"))

    def __post_init__(self) -> None:
        raise_mistakes(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.r < 1:
            yield f"lora.r ({self.r}) must be 1 or more"
        if self.alpha <= 0:
            yield f"lora.alpha ({self.alpha}) must be above 0"
        if not 0 <= self.dropout < 1:
            yield f"lora.dropout ({self.dropout}) must be at least 0 and below 1"
        if self.targets == AUTO:
            return
        if not self.targets or len(set(self.targets)) < len(self.targets):
            yield f"lora.targets ({list(self.targets)}) must be different matrices, at least one of w1, v1, w2"
        for name in self.targets:
            yield from caught(one_of, "lora.targets", name, MATRICES)

    @property
    def scale(self) -> float:
        """The scale of the products B A."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    def targets_of(self, activation: str) -> tuple[str, ...]:
        """The matrices with an adapter, in order. Raises ValueError for `v1` with an MLP, which has none."""
        gated = ACTIVATIONS[activation].gated
        if self.targets == AUTO:
            return tuple(name for name in MATRICES if gated or name != "v1")
        if "v1" in self.targets and not gated:
            raise UserError(f"lora.targets (v1): experts with activation ({activation}) have no v1; use w1 and w2")
        return tuple(name for name in MATRICES if name in self.targets)


@suggests_keys
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The keys of the MoE layers, in Python and in YAML (docs/reference/configuration.md).

    Attributes:
        num_experts: experts in a layer.
        top_k: experts of each token.
        expert_hidden_size: width of one expert, or a list of one width for each expert (multiples of 8 use 16-byte
            loads and stores, others are padded by a copy of the weights); auto = that of the replaced FFN.
        activation: swiglu | geglu | geglu_tanh | reglu | silu | gelu | gelu_tanh | relu | relu2; auto = that of the
            replaced FFN.
        bias: whether experts have biases; auto = those of the FFN that they are copied from, else none.
        layers: all | {every: n} | a list of layer indices.
        gate: `{name: ..., ...}`; the other keys belong to the gate.
        loss: weights of auxiliary losses by name, for example `{balance: 0.01, z: 0.001}`; auto = the gate's defaults,
            `{balance: 0.01}` for most.
        balance_over: scope of balance, importance and load losses: sequence (packed documents are sequences too) | rank
            | group (ranks that share experts) | microbatch (of all ranks) | batch (all microbatches of a step, with one
            more forward pass if there are several).
        freeze: parts of the layers that are not trained: [gate] = the gate's weights and balancing bias. The gate's
            losses still have gradients for earlier layers.
        lora: a `LoRAConfig` or its keys; absent = no adapters, and experts are trained themselves.
        init: random | upcycle (each expert starts as a copy of the dense FFN, or of a shard of it) | auto (upcycle if
            the dense FFN was loaded, else random). The weights of an MoE block are always kept.
        init_std: standard deviation of random weights; divided by sqrt(2 * number of layers) for projections back to
            the residual stream, as in GPT-2 (Radford et al. 2019, section 2.3).
        shared_expert_hidden_size: width of an expert that every token uses; 0 = none.
        shared_expert_gate: multiply the shared expert's output by sigmoid(x w), as Qwen2-MoE does.
        capacity: null = dropless; a number = capacity factor with token dropping.
        drop: the choices beyond the capacity: the last in token order (position) or those of least weight (weight).
        backend: auto | blocksparse | grouped | reference.
        memory: save | recompute the activation in the backward pass (blocksparse).
        seed: initial weights depend on (seed, layer, expert), and on whether a GPU or a CPU draws them.
        mesh: a `MeshConfig` or its keys; absent = Composer's data parallelism; auto = the planner chooses it when
            `foundry-moe train` starts, for a run that resumes on any number of GPUs.
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
    freeze: tuple[str, ...] = field(default=(), metadata=form("a list of parts such as [gate]"))
    lora: LoRAConfig | dict[str, Any] | None = field(
        default=None, metadata=form("a mapping such as {r: 16, alpha: 32}")
    )
    init: str = AUTO
    init_std: float = 0.02
    shared_expert_hidden_size: int = 0
    shared_expert_gate: bool = False
    capacity: float | None = field(
        default=None, metadata=form("null for dropless, or a capacity factor such as 1.25 (`dynamic` dropped nothing)")
    )
    drop: str = "position"
    backend: str = "auto"
    memory: str = "save"
    seed: int = 17
    mesh: MeshConfig | dict[str, Any] | Literal["auto"] | None = field(
        default=None, metadata=form("auto, or a mapping such as {expert: 8, shard: auto}")
    )

    def __post_init__(self) -> None:
        widths = self.expert_hidden_size
        if isinstance(widths, list | tuple):
            one = widths[0] if len(widths) == self.num_experts and len(set(widths)) == 1 else None
            object.__setattr__(self, "expert_hidden_size", one or tuple(widths))
        mistakes = [*caught(self._read, "mesh", MeshConfig), *caught(self._read, "lora", LoRAConfig)]
        raise_mistakes([*self._mistakes(), *mistakes])

    def _read(self, key: str, cls: type) -> None:
        if isinstance(value := getattr(self, key), Mapping):
            object.__setattr__(self, key, from_mapping(cls, value, key))

    def _mistakes(self) -> Iterator[str]:
        if not 1 <= self.num_experts <= MOST_EXPERTS:
            yield f"num_experts ({self.num_experts}) must be from 1 to {MOST_EXPERTS}"
        elif not 1 <= self.top_k <= self.num_experts:
            yield f"top_k ({self.top_k}) must be between 1 and num_experts ({self.num_experts})"
        yield from self._width_mistakes()
        if self.shared_expert_hidden_size < 0:
            yield f"shared_expert_hidden_size ({self.shared_expert_hidden_size}) must be 0 or more"
        if self.shared_expert_gate and not self.shared_expert_hidden_size:
            yield "shared_expert_gate (true) needs a shared expert: set shared_expert_hidden_size"
        for name, known in (
            ("activation", [AUTO, *ACTIVATIONS]),
            ("backend", (AUTO, "blocksparse", "grouped", "reference")),
            ("init", (AUTO, "random", "upcycle")),
            ("memory", ("save", "recompute")),
            ("balance_over", ("sequence", "rank", "group", "microbatch", "batch")),
            ("drop", ("position", "weight")),
        ):
            yield from caught(one_of, name, getattr(self, name), known)
        for part in self.freeze:
            yield from caught(one_of, "freeze", part, ("gate",))
        yield from caught(self.check_mesh)
        yield from self._lora_mistakes()
        if self.init_std <= 0:
            yield f"init_std ({self.init_std}) must be above 0"
        yield from self._layer_mistakes()
        if not isinstance(self.gate.get("name"), str):
            yield f"gate ({self.gate!r}) must name a gate: gate: {{name: topk}}"
        for name, weight in {} if self.loss == AUTO else self.loss.items():
            if not fits(weight, float) or weight < 0:
                yield f"loss.{name} ({weight!r}) must be a number of 0 or more"
        if self.capacity is not None and self.capacity <= 0:
            yield f"capacity ({self.capacity}) must be above 0, or null for dropless"
        if self.drop == "weight" and self.capacity is None:
            yield f"drop ({self.drop}) needs a capacity factor: set capacity ({self.capacity}) to a number such as 1.25"

    def _lora_mistakes(self) -> Iterator[str]:
        if self.lora_config is None:
            return
        if self.activation in ACTIVATIONS:
            yield from caught(self.lora_config.targets_of, self.activation)
        if isinstance(self.expert_hidden_size, tuple):
            yield "lora does not support experts of different widths: give one expert_hidden_size, or delete lora"

    def _width_mistakes(self) -> Iterator[str]:
        widths = self.expert_hidden_size
        if isinstance(widths, int) and widths < 1:
            yield f"expert_hidden_size ({widths}) must be 1 or more, or auto"
        if not isinstance(widths, tuple):
            return
        if len(widths) != self.num_experts:
            yield (
                f"expert_hidden_size has {len(widths)} widths, but num_experts is {self.num_experts}: give one width "
                "for each expert, or one number for all"
            )
        if min(widths, default=1) < 1:
            yield f"expert_hidden_size ({list(widths)}): every width must be 1 or more"
        for key, value, allowed in (
            ("backend", self.backend, ("auto", "blocksparse", "reference")),
            ("init", self.init, (AUTO, "random")),
            ("bias", self.bias, (AUTO, False)),
        ):
            if value not in allowed:
                use = " or ".join(yaml_value(word) for word in allowed)
                yield f"{key} ({value}) does not support experts of different widths: use {key}: {use}"

    def _layer_mistakes(self) -> Iterator[str]:
        layers = self.layers
        if isinstance(layers, str) and layers != "all":
            yield f"layers ({layers!r}) must be all, {{every: n}} or a list of indices such as [1, 3, 5]"
        if isinstance(layers, dict) and (
            set(layers) != {"every"} or not isinstance(layers["every"], int) or layers["every"] < 1
        ):
            yield f"layers ({layers!r}) must be {{every: n}} with n a whole number of 1 or more"
        if isinstance(layers, tuple) and (not layers or len(set(layers)) != len(layers) or min(layers) < 0):
            yield f"layers ({list(layers)}) must be distinct indices from 0 up, at least one"

    @property
    def mesh_config(self) -> MeshConfig | None:
        """`mesh`, or None; `auto` is a mesh of any number of GPUs until it is chosen."""
        return MeshConfig() if self.mesh == AUTO else self.mesh if isinstance(self.mesh, MeshConfig) else None

    @property
    def lora_config(self) -> LoRAConfig | None:
        """`lora`, or None."""
        return self.lora if isinstance(self.lora, LoRAConfig) else None

    def check_mesh(self, mesh: MeshConfig | None = None) -> None:
        """Raises ValueError for a mesh, by default that of `mesh`, with a key that these experts do not support."""
        mesh = mesh or self.mesh_config
        if mesh is None:
            return
        if self.lora_config is not None and self.lora_config.dropout and mesh.expert not in (AUTO, 1):
            raise UserError(
                f"lora.dropout ({self.lora_config.dropout}) does not support mesh.expert ({mesh.expert}) above 1: rows "
                "that are dispatched in rounds are computed again, with other random numbers; use lora.dropout: 0.0 or "
                "mesh.expert: 1"
            )

    def shards_of(self, dense: int, name: str) -> int:
        """The number of experts that an FFN of width `dense` is cut into by `init: upcycle`.

        Raises:
            ValueError: the width, a number or the gate does not fit; `name` is the FFN's.
        """
        width = dense if self.expert_hidden_size == AUTO else self.expert_hidden_size
        if not isinstance(width, int) or dense % width:
            raise UserError(
                f"expert_hidden_size ({width}) must be that of {name} ({dense}) or a fraction of it for init: upcycle; "
                "leave it auto"
            )
        shards = dense // width
        for key, value in (("num_experts", self.num_experts), ("top_k", self.top_k)):
            if value % shards:
                raise UserError(
                    f"{key} ({value}) must be a multiple of {shards} for init: upcycle, since {name} ({dense} wide) is "
                    f"cut into {shards} experts of {width}"
                )
        if shards > 1 and self.gate["name"] != "topk":
            raise UserError(
                f"gate.name ({self.gate['name']}): init: upcycle with experts of 1/{shards} of the width needs topk"
            )
        return shards

    def check_layers_of(self, num_layers: int) -> None:
        """Raises ValueError if `layers` has an index that a model of `num_layers` does not have."""
        if isinstance(self.layers, tuple) and max(self.layers) >= num_layers:
            raise UserError(f"layers ({list(self.layers)}): the model has {num_layers}, so use 0 to {num_layers - 1}")

    def selects(self, layer_index: int) -> bool:
        """Whether the layer at this index has experts. `{every: 2}` selects layers 1, 3, 5, ... as GShard does."""
        if isinstance(self.layers, dict):
            return (layer_index + 1) % self.layers["every"] == 0
        return self.layers == "all" or layer_index in self.layers
