"""Expert parallelism and FSDP2 for models of transformers 5 whose experts run on our backend.

The public names are those of `foundry_moe.integrations.transformers`. Independent of trainers and of kernels.

Shapes: T tokens of this rank, Q rows received, K choices per token, E experts, D model width.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from foundry_moe.config import MeshConfig
from foundry_moe.integrations.transformers import NAME, _unread, register
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops import PermutePlan
from foundry_moe.parallel.all_to_all import AllToAllDispatcher
from foundry_moe.parallel.gradients import LocalWeight, clip_grad_norm_
from foundry_moe.parallel.mesh import MeshPlan, average_on_gloo, build_meshes, check_replicas, divisors, listed
from foundry_moe.parallel.placement import check_whole, local_weights, plan_for_counts, shard_experts
from foundry_moe.parallel.transformer_blocks import allow_compilations, disable_hooks_once, wrapped_modules
from foundry_moe.schema import UserError, from_mapping

__all__ = ["clip_grad_norm_", "parallelize", "save_pretrained"]

INDEX = "model.safetensors.index.json"


def parallelize(
    model: Any,
    mesh: MeshConfig | Mapping[str, Any],
    *,
    weights: str | os.PathLike[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int = True,
    aux_loss: str = "rank",
    device: torch.device | str | None = None,
    ranks_per_node: int | None = None,
) -> MeshPlan:
    """Shards a model over all ranks of the job; each of them then trains on a batch of its own.

    Experts are divided over `expert` and sharded over `shard` by FSDP2; all other parameters are sharded over both.
    Gradients are those of data parallelism: of the mean of all ranks' losses. Parameters keep their names. Create the
    optimizer after this, and clip with `clip_grad_norm_` of this module.

    Args:
        model: a PreTrainedModel, with the same weights on all ranks; or on the meta device.
        weights: of a model on the meta device: a folder of safetensors, of which each rank reads its slices, in a
            layout that `from_pretrained` takes. None = they are drawn, block by block, by generators that must have
            the same seed on all ranks.
        mesh: widths of the mesh, for example `{"expert": 8, "shard": "auto"}`. Of the other keys `all_to_all` and
            `compile` have an effect; `compile` takes the loss function too.
        mp_policy: for example `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.
        reshard_after_forward: as in `fully_shard`.
        aux_loss: the tokens over which the model's load-balancing loss takes its means: of each `rank`, as transformers
            does, or of `all` ranks. It is part of the loss if the model is called with `output_router_logits=True`.
        device: of this rank; default: the current GPU, or the CPU.
        ranks_per_node: default: LOCAL_WORLD_SIZE, or all.

    Raises:
        ValueError: no experts of transformers' interface, weights that our kernels do not read, a mesh that fits
            neither the job nor the experts, or a folder without all weights.
        ImportError: transformers is missing, or older than 5.
    """
    if aux_loss not in ("rank", "all"):
        raise UserError(f"aux_loss ({aux_loss!r}) must be 'rank' or 'all'")
    mesh_config = mesh if isinstance(mesh, MeshConfig) else from_mapping(MeshConfig, mesh, "mesh")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_whole(model)
    name_of_class = type(model).__name__
    found = dict(named_experts(model))
    if not found:
        raise UserError(f"{type(model).__name__} has no experts of transformers' interface: see the list of families")
    for name, experts in found.items():
        if (reason := _unread(experts)) is not None:
            raise UserError(f"{name} cannot be sharded: {reason}; load the model in bfloat16 or float32")
    plan = plan_for_counts({experts.num_experts for experts in found.values()}, mesh_config, ranks_per_node)
    for name, experts in found.items():
        for parameter_name, parameter in experts.named_parameters(recurse=False):
            _shard_dimension(parameter, plan, f"{name}.{parameter_name}")
    check_replicas(plan.replicate, device.type)
    average_on_gloo()
    register()
    model.set_experts_implementation(NAME)
    if aux_loss == "all":
        model.register_forward_hook(_balance_over_all_ranks, with_kwargs=True)
    meshes = build_meshes(plan, device.type)
    policy = mp_policy or MixedPrecisionPolicy()
    settings: Any = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    models: list[Any] = [module for module in model.modules() if hasattr(module, "_init_weights")]
    owners: dict[nn.Module, Any] = {module: owner for owner in models for module in owner.modules()}
    mapping = _conversions(model) if weights is not None else []  # FSDP2 changes the classes that it goes by
    sharded: set[nn.Module] = set()
    blocks = _blocks(model)
    if mesh_config.compiles(on_gpu=device.type == "cuda"):
        if blocks[:-1]:
            _compile(model, blocks[:-1], found.values())
        elif mesh_config.compile == "blocks":
            raise UserError("mesh.compile (blocks): the model names no blocks (`_no_split_modules`); use compile: none")
    for block in blocks:
        if weights is None:
            _draw(block, owners, device)
        if block is model and on_meta:
            model.tie_weights()
        for experts in dict(named_experts(block)).values():
            if experts in sharded:
                continue
            for child in experts.children():  # a norm that all experts share
                if next(child.parameters(), None) is not None:
                    fully_shard(child, mesh=meshes.dense, **settings)
            shard_experts(
                experts,
                meshes.plan.experts_of(dist.get_rank(), experts.num_experts),
                meshes,
                dimension_of=lambda parameter: _shard_dimension(parameter, plan),
                device=device,
                mp_policy=policy,
                reshard_after_forward=reshard_after_forward,
            )
            sharded.add(experts)
        fully_shard(block, mesh=meshes.dense, **settings)
    if weights is not None:
        _load(model, Path(weights), mapping, device)
        _draw(model, owners, device)  # buffers that no file has
    for experts in sharded:
        if local := local_weights(experts, plan):
            dispatcher = AllToAllDispatcher(meshes.token_groups, num_experts=cast(Any, experts).num_experts)
            cast(Any, experts).placed = Placed(dispatcher, local)
    for module in wrapped_modules(model):
        disable_hooks_once(module)
    model._get_name = partial(str, name_of_class)  # FSDP2 changes the class's; Trainer shifts labels by this name
    return plan


def named_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules whose class uses transformers' experts interface, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "down_proj"):
            yield name, module


@dataclass(frozen=True)
class Placed:
    """Set as `placed` of experts that are divided over ranks; `local` gives this rank's part of a parameter."""

    dispatcher: AllToAllDispatcher
    local: LocalWeight

    @torch.compiler.disable
    def dispatch(
        self,
        compute: Callable[[Tensor, Tensor, PermutePlan], Tensor],
        x_TD: Tensor,
        experts_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        """y_TD. Tokens travel to the ranks of their experts, and the weighted sums of their outputs back.

        Args:
            compute: y_QD of x_QD, weights_QK and the plan of the rows received, for this rank's experts.
        """
        rows = self.dispatcher.dispatch(x_TD, Choices(experts_TK=experts_TK, weights_TK=weights_TK), part=0).receive()
        assert rows.weights is not None and rows.plan is not None
        return self.dispatcher.combine(rows.send_back(compute(rows.x, rows.weights, rows.plan)))


def _blocks(model: Any) -> list[Any]:
    """The modules that FSDP2 wraps, inner ones first: those that transformers does not split, and the model."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    return [*reversed(blocks), model]


def _compile(model: Any, blocks: Sequence[nn.Module], all_experts: Iterable[nn.Module]) -> None:
    """Compiles the blocks' forward pass in training, up to the experts and after them, and the loss function.

    A block's class gets a subclass with the compiled forward: transformers wraps the forward of every new class to
    checkpoint gradients, and inside of the compiled function a checkpoint would be run without compilation.
    """
    allow_compilations(len(blocks))
    # transformers adds hooks that record router logits at the first call that asks for them
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    for experts in all_experts:  # FSDP2's hooks break the graph before them, and their forward would be many graphs
        experts.forward = torch.compiler.disable(experts.forward)  # type: ignore[method-assign]
    compiled: dict[type, type] = {}
    for block in blocks:
        kind = type(block)
        if kind not in compiled:
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            compiled[kind] = type(kind.__name__, (kind,), {**names, "forward": _compiled_in_training(kind.forward)})
        block.__class__ = compiled[kind]
    if hasattr(model, "loss_function"):
        model.loss_function = torch.compile(model.loss_function)


def _compiled_in_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Generation would be compiled once for each layer, whose number its cache reads."""
    compiled = torch.compile(forward)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (compiled if self.training else forward)(self, *args, **kwargs)

    return call


def _shard_dimension(parameter: nn.Parameter, plan: MeshPlan, name: str = "") -> int:
    """The dimension of an experts' parameter that `shard` cuts: 0 without expert parallelism, else the last.

    Gate and up are concatenated along dimension 1, so only parts along the last one can be read from files in which
    they are apart.

    Raises:
        ValueError: `shard` divides neither.
    """
    if plan.expert == 1 and parameter.shape[0] % plan.shard == 0:
        return 0
    width = parameter.shape[-1]
    if width % plan.shard:
        valid = [d for d in divisors(plan.world_size // plan.expert) if width % d == 0]
        raise UserError(f"mesh.shard ({plan.shard}) must divide the width ({width}) of {name}: use {listed(valid)}")
    return parameter.dim() - 1


@torch.no_grad()
def _draw(block: nn.Module, owners: Mapping[nn.Module, Any], device: torch.device) -> None:
    """Draws the parameters and computes the buffers of a block that are on the meta device, as transformers does.

    Args:
        owners: the model whose initialization a module has.
    """
    for module in reversed(list(block.modules())):
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        unreal = {name: tensor for name, tensor in own.items() if tensor.is_meta}
        for name, tensor in unreal.items():
            real = torch.empty_like(tensor, device=device)
            setattr(module, name, nn.Parameter(real, tensor.requires_grad) if name in module._parameters else real)
        if unreal:
            owners[module]._init_weights(module)


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _load(model: Any, folder: Path, mapping: list[Any], device: torch.device) -> None:
    """Reads this rank's slices of a sharded model's weights, converted by transformers as `mapping` says."""
    from transformers.core_model_loading import WeightConverter, convert_and_load_state_dict_in_model, rename_source_key
    from transformers.modeling_utils import LoadStateDictConfig  # type: ignore[attr-defined]

    files, index = [folder / "model.safetensors"], folder / INDEX  # read in this order, as transformers does
    if not files[0].exists() and index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not files[0].exists():
        raise UserError(f"weights ({folder}): no {files[0].name}: give a folder that save_pretrained wrote")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        slices = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
        state, inside = model.state_dict(), tuple(f"{name}." for name, _ in named_experts(model))
        for name in slices:
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            used = [each.operations for each in converters if pattern in each.source_patterns]
            kinds = {type(each).__name__ for each in (used or [[]])[0]}
            # transformers slices before it converts, which is right where experts are joined, and not in general
            if kinds - {"MergeModulelist", "Concatenate"} or (kinds and not target.startswith(inside)):
                raise UserError(
                    f"weights ({folder}): {name} is converted ({', '.join(sorted(kinds))}), so it has no slices: omit "
                    "weights, and give a model of from_pretrained"
                )
        config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping)
        found, _ = convert_and_load_state_dict_in_model(model, slices, config)
    model.tie_weights()
    unread = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unread or found.conversion_errors:
        problems = [*unread, *map(str, found.conversion_errors)]
        raise UserError(f"weights ({folder}): no tensors that fit {', '.join(problems[:3])} ({len(problems)} in all)")


def save_pretrained(model: Any, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> None:
    """Writes a sharded model as its own `save_pretrained` does: configuration, names, layouts, division into files.

    Every rank of the job calls this. Rank 0 holds the weights of one block at a time, and alone writes.

    Args:
        folder: on a file system of rank 0.
        max_shard_size: of a file.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import revert_weight_conversion

    folder, is_writer = Path(folder), dist.get_rank() == 0
    dropped = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}
    unreal = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    targets = revert_weight_conversion(model, unreal)
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault("".join(re.findall(r"^.*?\.\d+(?=\.)", name)), []).append(name)
    parts = [revert_weight_conversion(model, {name: unreal[name] for name in names}) for names in groups.values()]
    if {name: t.shape for part in parts for name, t in part.items()} != {name: t.shape for name, t in targets.items()}:
        groups = {"": list(state)}  # a conversion joins tensors of several blocks
    split = split_state_dict_into_shards_factory(  # parts of one tensor go to one file, as transformers has it
        targets,
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    places: dict[str, tuple[Path, int]] = {}
    if is_writer:
        type(model).save_pretrained(model, folder, state_dict={})  # all but the weights
        for file, names in split.filename_to_tensors.items():
            places |= _start_file(folder / f"{file}.partial", {name: targets[name] for name in names})
    for names in groups.values():
        whole = {}
        for name in names:
            tensor = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
            if is_writer:
                whole[name] = tensor.cpu()
            del tensor
        for name, tensor in revert_weight_conversion(model, whole).items() if is_writer else ():
            path, start = places[name]
            with path.open("r+b") as out:
                out.seek(start)
                out.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
    if is_writer:
        for name in split.filename_to_tensors:
            (folder / f"{name}.partial").rename(folder / name)
        (folder / INDEX).unlink(missing_ok=True)
        if split.is_sharded:
            metadata = {"total_parameters": model.num_parameters(), **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    dist.barrier()


def _start_file(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Path, int]]:
    """Writes the header of a safetensors file: the file and the first byte of each tensor that it is to hold."""
    dtypes = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    return {name: (file, 8 + len(text) + header[name]["data_offsets"][0]) for name in tensors}


def _balance_over_all_ranks(model: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    """Replaces the load-balancing loss of this rank's tokens in the model's loss by this rank's share of all ranks'."""
    if isinstance(output, tuple):
        raise UserError("aux_loss='all' needs the outputs' names: call the model without return_dict=False")
    logits = getattr(output, "router_logits", None)
    if getattr(output, "aux_loss", None) is None or not logits or getattr(output, "loss", None) is None:
        return
    if any(arg is not None for arg in args[1:2]):
        raise UserError("aux_loss='all' needs the mask by name: call model(input_ids, attention_mask=mask)")
    shared = _balance(logits, _setting_of(model, "num_experts_per_tok"), kwargs.get("attention_mask"))
    output.loss = output.loss + aux_loss_weight(model) * (shared - output.aux_loss).to(output.loss)
    output.aux_loss = shared


def aux_loss_weight(model: Any) -> float:
    """Of the load-balancing loss in the model's loss."""
    jetmoe = hasattr(model.config.get_text_config(), "aux_loss_coef")
    return _setting_of(model, "aux_loss_coef" if jetmoe else "router_aux_loss_coef")


def _setting_of(model: Any, name: str) -> Any:
    """The model's attribute, which its forward reads, or its configuration's."""
    own = getattr(model, name, None)
    return getattr(model.config.get_text_config(), name) if own is None else own


def _balance(logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None) -> Tensor:
    """The loss of Fedus et al. 2021 (arXiv 2101.03961, equations 4 to 6) as transformers computes it.

    Fractions of tokens are those of all ranks' tokens, and the mean over ranks of this is the loss of all tokens.
    """
    experts = logits[0].shape[-1]
    chosen_E1 = logits[0].new_zeros(experts + 1, dtype=torch.float32)  # and the number of tokens
    probs_E = torch.zeros_like(chosen_E1[:-1])
    for logits_TE in logits:
        probs_TE = logits_TE.to(chosen_E1.device).softmax(-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(top_k).indices, 1).float()
        one_T1 = torch.ones_like(chosen_TE[:, :1])
        weight_T1 = one_T1 if mask is None else mask.reshape(-1, 1).to(one_T1)
        chosen_E1 += (torch.cat([chosen_TE, one_T1], 1) * weight_T1).sum(0)
        probs_E = probs_E + (probs_TE.float() * weight_T1).sum(0)
    chosen_E1 = chosen_E1.detach()
    dist.all_reduce(chosen_E1)
    return experts * dist.get_world_size() * (chosen_E1[:-1] * probs_E).sum() / chosen_E1[-1].square()
