"""The Composer algorithm `dmoe_mesh`: places a model on its mesh, and reduces and clips its gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer.algorithms import SAM, GradientClipping
from composer.callbacks import OptimizerMonitor
from composer.core import Algorithm, Event, State
from composer.distributed.fsdp2 import create_mixed_precision_policy
from composer.distributed.fsdp2_utils import generate_composer_model_policy
from composer.loggers import Logger
from composer.utils import FSDP2Config, dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from foundry_moe.config import AUTO, MESH_NEEDS_PLAN, RESHARD, MeshConfig, check_compilation, refuse_other_parallelism
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.optim.adamw import FusedAdamW
from foundry_moe.optim.muon import Muon
from foundry_moe.parallel.expected_counts import expect_counts
from foundry_moe.parallel.gradient_messages import GradientMessages, send_own_dtype
from foundry_moe.parallel.gradients import clip_factor, clip_value, gradient_norm, scale_gradients
from foundry_moe.parallel.mesh import HIERARCHICAL, MeshPlan, plan_mesh
from foundry_moe.parallel.one_pass_cast import cast_in_one_pass, slice_mesh_once
from foundry_moe.parallel.placement import parallelize
from foundry_moe.parallel.transformer_blocks import (
    SINK_WAITS,
    block_lists,
    compile_blocks,
    disable_hooks_once,
    prefetch_in_order,
    wrapped_modules,
)
from foundry_moe.schema import UserError, from_mapping, takes_keys_of, with_keys

log = logging.getLogger(__name__)

CLIPPING = ("norm", "value")


def check_parallelism(state: State) -> None:
    """Raises ValueError for FSDP1 and tensor parallelism: see `refuse_other_parallelism`."""
    fsdp1 = state.fsdp_config is not None and not isinstance(state.fsdp_config, FSDP2Config)
    refuse_other_parallelism(tensor_parallel=state.tp_config is not None, fsdp_version="1" if fsdp1 else "2")


def show_model(state: State) -> None:
    """Tells the optimizer, if it is Muon, which model its parameters are of."""
    for optimizer in state.optimizers or ():
        if isinstance(optimizer, Muon):
            optimizer.model = state.model


def place_on_mesh(state: State, mesh_config: MeshConfig) -> None:
    """At `Event.INIT`: places the experts on the mesh, and leaves all other modules to Composer's FSDP2.

    Composer's `GradientClipping` fails on parameters of different meshes and is replaced by `MeshGradients`.

    Raises:
        ValueError: no FSDP2 configuration, a mesh that does not fit the job or the model, adaptive clipping.
    """
    check_parallelism(state)
    if dist.get_world_size() == 1:
        for layer in moe_layers(state.model):
            plan_mesh(mesh_config, world_size=1, ranks_per_node=1, num_experts=layer.num_experts)
        fused = isinstance(state.optimizers[0], FusedAdamW)
        if fused and all(clipping.clipping_type in CLIPPING for clipping in _clippings(state)):
            _replace_clipping(state, replicated=False)
        _compile(state, mesh_config)
        return
    if not isinstance(state.fsdp_config, FSDP2Config):
        raise UserError(
            "mesh needs FSDP2: give the run `fsdp_config: {}`, with FSDP_VERSION=2 in the environment if LLM Foundry's "
            "own entry starts it, or pass parallelism_config={'fsdp': FSDP2Config()} to Trainer (from composer.utils "
            "import FSDP2Config; Composer ignores a key `fsdp2`)"
        )
    _leave_unwrapped(state.model)
    policy = create_mixed_precision_policy(state.precision, state.fsdp_config.mixed_precision)
    placement = parallelize(
        state.model,
        mesh_config,
        optimizers=state.optimizers,
        reshard_after_forward=state.fsdp_config.reshard_after_forward,
        mp_policy=policy,
        device=state.device._device,  # type: ignore[arg-type]
        ranks_per_node=dist.get_local_world_size(),
        blocks=_wrapped_blocks(state.model),
    )
    state.fsdp_config.device_mesh = placement.mesh
    if placement.plan.expert > 1 and mesh_config.sizes == "expected":
        repeat_group = None if placement.plan.expert == dist.get_world_size() else torch.distributed.group.WORLD
        expect_counts(state.model, moe_layers(state.model), state.device._device, repeat_group)  # type: ignore[arg-type]
    computed_in = policy.param_dtype or torch.float32
    reduced_in = policy.reduce_dtype or computed_in
    _replace_clipping(
        state,
        replicated=placement.plan.replicate > 1,
        keeps_weights=state.fsdp_config.reshard_after_forward is False,
        adds=reduced_in in (torch.float32, torch.float64),
        sent_in=computed_in if computed_in.itemsize < reduced_in.itemsize else None,
        divides_experts=placement.plan.expert > 1,
    )
    # with experts divided, a block's graph ends before its experts: nothing is left to compute while it waits
    _compile(state, mesh_config, **SINK_WAITS if placement.plan.expert == 1 else {})
    if dist.get_global_rank() == 0:
        _say_plan(placement.plan, mesh_config)


def _say_plan(plan: MeshPlan, mesh_config: MeshConfig) -> None:
    log.info("mesh %s, all_to_all %s", plan, plan.all_to_all)
    if mesh_config.all_to_all == HIERARCHICAL != plan.all_to_all:
        log.warning("mesh.all_to_all: hierarchical is flat here: no expert group spans nodes of more than one GPU")


def _wrapped_blocks(model: Any) -> list[nn.Module]:
    """The blocks that Composer will wrap."""
    policy = generate_composer_model_policy(model)
    wrapped = policy._run_policy(root_module=model, ignored_modules=set(), root_kwargs={})
    return [block for blocks in block_lists(model) for block in blocks if block in wrapped]


def _leave_unwrapped(model: nn.Module) -> None:
    """Removes LLM Foundry's FSDP2 mark from modules without parameters.

    Each block of an MPT calls the rotary embedding; FSDP2's hooks on it would break the graph of a compiled block.
    """
    for module in model.modules():
        if getattr(module, "_fsdp_wrap", False) and next(module.parameters(), None) is None:
            module._fsdp_wrap = False  # type: ignore[assignment]


def _compile(state: State, mesh_config: MeshConfig, **options: Any) -> None:
    if not mesh_config.compiles(on_gpu=state.device.name == "gpu"):
        return
    if not compile_blocks(state.model, **options) and mesh_config.compile == "blocks":
        raise UserError("mesh.compile (blocks): the model has no list of blocks with MoE layers; use compile: none")


def _clippings(state: State) -> list[GradientClipping]:
    return [algorithm for algorithm in state.algorithms if type(algorithm) is GradientClipping]


def _replace_clipping(state: State, **settings: Any) -> None:
    """Puts `MeshGradients` in the place of Composer's `GradientClipping`, with its settings and these."""
    kind, threshold = None, 0.0
    if len(found := _clippings(state)) > 1:
        raise UserError(f"gradient_clipping: {len(found)} of them, and a mesh takes one: keep one")
    for clipping in found:
        kind, threshold = clipping.clipping_type, clipping.clipping_threshold
        if kind not in CLIPPING:
            raise UserError(
                f"gradient_clipping.clipping_type ({kind}) does not support a mesh: use {' or '.join(CLIPPING)}"
            )
        state.algorithms.remove(clipping)
    state.algorithms.append(MeshGradients(**settings, clipping_type=kind, clipping_threshold=threshold))


def _is_whole(weight: Any) -> bool:
    """Whether a parameter is divided by FSDP2 and its shard groups have one rank: only replicas hold it too."""
    if not isinstance(weight, DTensor):
        return False
    mesh = weight.device_mesh
    named = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return max((size for name, size in named if name.startswith("shard")), default=2) == 1


def _can_add(module: nn.Module, *, sharded: bool) -> bool:
    """Whether the gradients of a module that FSDP2 wraps may be added up, and their sum alone be reduced.

    Its trained weights must be whole, unless `sharded`. FSDP2 then adds a microbatch's gradients in 10 bytes of memory
    traffic per weight, where FSDP2's reduction over a shard group of one rank takes 26.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return bool(trained) and (sharded or all(map(_is_whole, trained)))


def _was_gathered(module: Any) -> bool:
    """Whether FSDP2 has gathered a module's weights in this process, without which it fails to add their gradients."""
    group = module._get_fsdp_state()._fsdp_param_group  # private (torch 2.7 to 2.11)
    return group is not None and all(hasattr(weight, "_unsharded_param") for weight in group.fsdp_params)


def count_samples(batch: Any) -> int | None:
    """Samples in a batch of tensors; None for a batch of another kind."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        return count_samples(batch[0])
    return None


def _check_norms(state: State) -> None:
    """Raises ValueError for parts of Composer that add up norms of all gradients, if these are on several meshes."""
    meshes = {weight.device_mesh for weight in state.model.parameters() if isinstance(weight, DTensor)}
    if len(meshes) < 2:
        return
    if any(isinstance(callback, OptimizerMonitor) for callback in state.callbacks):
        raise UserError(
            "callbacks.optimizer_monitor does not support experts on a mesh of their own: delete it; with "
            "algorithms.gradient_clipping of clipping_type: norm, mesh/gradient_norm is logged"
        )
    if any(isinstance(algorithm, SAM) for algorithm in state.algorithms):
        raise UserError("algorithms.sam does not support experts on a mesh of their own: delete it")


@dataclass(kw_only=True, eq=False, repr=False)
class MeshGradients(Algorithm):
    """Gradients of a model on a mesh: averaged over replicas once per batch, and clipped by one norm over all meshes.

    Also keeps gathered weights from one microbatch to the next, and sets the order in which FSDP2 prefetches weights.
    Added by `place_on_mesh`; not for YAML.

    Args:
        replicated: there are replicas, whose gradients are summed after the last microbatch.
        keeps_weights: FSDP2 gathers weights once per batch, and frees them in the last microbatch's backward pass,
            where it also reduces the sum of the microbatches' gradients over shards.
        adds: gradients are reduced in fp32 or fp64; else each microbatch's are, since FSDP2 would add them up in less.
        sent_in: the dtype of gradients, if it is smaller than the one that they are reduced in.
        divides_experts: experts are divided, and `sent_in` is for their gradients alone: other weights are few, and the
            ranks that have them exchange tokens.
        clipping_type: norm | value, or None for no clipping.
        clipping_threshold: the largest norm, or the largest magnitude of an element.
    """

    replicated: bool
    keeps_weights: bool = False
    adds: bool = True
    sent_in: torch.dtype | None = None
    divides_experts: bool = False
    clipping_type: str | None = None
    clipping_threshold: float = 0.0

    def __post_init__(self) -> None:
        self._messages: dict[nn.Module, GradientMessages] = {}
        # modules whose gradients are added up. Chosen before the first batch, while their parameters are sharded, and
        # after its first forward pass, which gathers them
        self._adding: set[nn.Module] | None = None
        self._may_add: set[nn.Module] = set()
        self._wrapped: list[Any] = []  # modules that FSDP2 wraps
        self._expected: int | None = None
        self._seen = 0

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.BEFORE_LOAD, Event.FIT_START, Event.AFTER_TRAIN_BATCH):
            return True
        counts = self.replicated or self.keeps_weights
        if event == Event.BEFORE_BACKWARD:
            return counts or bool(self._messages)
        return counts and event == Event.BEFORE_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.FIT_START:
            _check_norms(state)
            prefetch_in_order(state.model)
        elif event == Event.BEFORE_LOAD:  # after FSDP2 has wrapped the model, before any forward pass
            experts = {layer.experts for layer in moe_layers(state.model)}
            for each in experts:
                in_block = not isinstance(each, FSDPModule)
                if in_block and _is_whole(next(each.parameters())):  # FSDP2 only casts them
                    cast_in_one_pass(each)
            for module in wrapped_modules(state.model):
                disable_hooks_once(module)
                slice_mesh_once(module)
                if self.sent_in is None or (self.divides_experts and module not in experts):
                    continue
                if messages := send_own_dtype(module, self.sent_in, dist.get_local_world_size()):
                    self._messages[module] = messages
        elif event == Event.BEFORE_TRAIN_BATCH:
            self._wrapped = wrapped_modules(state.model)
            self._expected, self._seen = self._microbatches(state), 0
            if self._adding is None:
                for module in self._wrapped:
                    module.reshard()  # an evaluation has gathered it
                self._may_add = {m for m in self._wrapped if self.adds and _can_add(m, sharded=self.keeps_weights)}
        elif event == Event.BEFORE_BACKWARD:
            self._seen += 1
            last = self._expected is None or self._seen >= self._expected
            if self._adding is None:
                self._adding = set(filter(_was_gathered, self._may_add))
            for module in self._wrapped:
                if module in self._adding:
                    module.set_requires_gradient_sync(last, recurse=False)
                elif self.replicated:
                    module.set_requires_all_reduce(last, recurse=False)
                if self.keeps_weights:
                    module.set_reshard_after_backward(last, recurse=False)
            for module, messages in self._messages.items():
                messages.begin(sums=module in self._adding and (self._expected or 1) > 1)
        else:
            GradientMessages.release()
            self._end_batch()
            self._clip(state, logger)

    def _microbatches(self, state: State) -> int | None:
        samples, size = count_samples(state.batch), state.device_train_microbatch_size
        if samples is None or not isinstance(size, int | float):
            return None  # reduce and free after each microbatch, which is slower but always right
        return max(1, math.ceil(samples / size))

    def _end_batch(self) -> None:
        """Compares the number of microbatches with the expected one."""
        if self._expected is None or self._seen >= self._expected:
            return
        if self._adding or self.replicated:
            raise RuntimeError(
                f"a batch had {self._seen} microbatches, not {self._expected} as expected, so gradients were not "
                "summed over all ranks: use mesh: {replicate: 1} and fsdp_config: {reshard_after_forward: true} with "
                "this data loader"
            )
        for module in self._wrapped:
            module.reshard()

    def _clip(self, state: State, logger: Logger) -> None:
        if self.clipping_type == "norm":
            parameters = list(state.model.parameters())
            norm = gradient_norm(parameters)
            factor = clip_factor(norm, self.clipping_threshold)
            optimizer = state.optimizers[0]
            if isinstance(optimizer, FusedAdamW):
                # scales while it reads the gradients; cast here, since the device is idle when the update begins
                optimizer.gradient_factor = factor.float()
            else:
                scale_gradients(parameters, factor)
            logger.log_metrics({"mesh/gradient_norm": norm})  # type: ignore[dict-item]
        elif self.clipping_type == "value":
            clip_value(state.model.parameters(), self.clipping_threshold)


@with_keys(MeshConfig)
class MoEMesh(Algorithm):
    """Places a model that was built with dMoE layers (`model.name: dmoe_causal_lm`) on a mesh.

    Runs on `Event.INIT`. For models that `algorithms.dmoe` converts, use its key `mesh`.

    YAML:

        algorithms:
          dmoe_mesh: {expert: 8, shard: auto, replicate: 1}

    Raises:
        ValueError: an unknown key or an invalid mesh; before any GPU work.
    """

    @takes_keys_of(MeshConfig)
    def __init__(self, **settings: Any) -> None:
        self.config = from_mapping(MeshConfig, settings, "algorithms.dmoe_mesh")

    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        place_on_mesh(state, self.config)


def add_mesh_algorithm(config: dict[str, Any]) -> dict[str, Any]:
    """LLM Foundry config transform: copies `model.moe.mesh` to `algorithms.dmoe_mesh`, which runs at `Event.INIT`.

    Raises:
        ValueError: both are given and differ; or `compile_config` with experts.
    """
    model = config.get("model") or {}
    mesh = (model.get("moe") or {}).get("mesh")
    if model.get("name") == "dmoe_causal_lm" or (config.get("algorithms") or {}).get("dmoe") is not None:
        check_compilation(config)
    if (fsdp := config.get("fsdp_config") or {}).get(RESHARD) == AUTO:  # which `foundry-moe train` would have chosen
        config["fsdp_config"] = {**fsdp, RESHARD: True}
    if mesh is None or model.get("name") != "dmoe_causal_lm":
        return config
    if mesh == AUTO:
        raise UserError(f"model.moe.{MESH_NEEDS_PLAN}")
    algorithms = dict(config.get("algorithms") or {})
    if algorithms.setdefault("dmoe_mesh", mesh) != mesh:
        raise UserError(
            f"algorithms.dmoe_mesh ({algorithms['dmoe_mesh']}) and model.moe.mesh ({mesh}) differ: keep one"
        )
    config["algorithms"] = algorithms
    return config
