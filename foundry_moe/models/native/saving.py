"""Makes `save_pretrained` and LLM Foundry's `hf_checkpointer` save a model with dMoE layers as its family.

LLM Foundry makes a second model, `type(model)(config)`, loads the first one's whole state dict into it and saves it.
So the converted model gets a class of its own, a subclass of what it was: called with a configuration it makes the
family's native model, which loads our state dict. If no family computes the same, both raise.

The converted model's `load_state_dict` takes what was saved: Hugging Face's Trainer resumes and loads its best model by
it, without strict names.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.models.blocks import WeightPart
from foundry_moe.models.native.architecture import architecture_of
from foundry_moe.models.native.state_dict import Native, native_of
from foundry_moe.models.native.targets import assemble
from foundry_moe.models.pretrained import by_tensor, fill
from foundry_moe.schema import UserError, plain_name

_HOW = (
    "save its state_dict, or use callbacks.elastic_checkpoint and `foundry-moe checkpoints export`, which writes it "
    "under our own names"
)


def let_save(model: nn.Module) -> None:
    """Gives the causal language model inside `model` a class whose saving writes its family's format.

    Its submodules that are transformers models themselves cannot be saved: no family has them. Nor can a model with
    another head.
    """
    found: list[Any] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for number, module in enumerate(found):
        was = type(module)
        if number:
            reason = f"this {was.__name__} is a part of a model with dMoE layers; save the whole model"
            module.save_pretrained = partial(_refuse, reason)
        elif not was.__name__.endswith("ForCausalLM"):
            reason = f"no family of Hugging Face MoE models has a {was.__name__}; {_HOW}"
            module.save_pretrained = partial(_refuse, reason)
        elif not issubclass(was, SavesNative):
            _become_native(module)


def _become_native(module: Any) -> None:
    was = type(module)
    names = {"__module__": was.__module__, "__qualname__": was.__qualname__}
    module.__class__ = type(was.__name__, (SavesNative, was), {**names, "_converted": weakref.ref(module)})


def _unpickle(was: type[nn.Module]) -> nn.Module:
    """A converted model without attributes, for pickle and copy, whose class exists in one process only."""
    module = was.__new__(was)
    _become_native(module)
    return module


def native_of_model(model: nn.Module) -> Native:
    """The family that a model in memory is exported as."""
    architecture = architecture_of(model)
    if architecture is None:
        raise UserError(f"{type(model).__name__} has no dMoE layers, or is no Hugging Face model")
    return native_of(architecture)


def _refuse(reason: str, *_: Any, **__: Any) -> None:
    raise UserError(f"save_pretrained: {reason}")


class SavesNative(nn.Module):
    """Mixed into the class of a converted model."""

    _converted: ClassVar[weakref.ref[Any]]
    generation_config: Any

    def __new__(cls, *arguments: Any, **keys: Any) -> Any:
        if not arguments and not keys:
            return super().__new__(cls)  # to be filled by a copy
        converted = cls._converted()
        assert converted is not None, "the converted model was deleted"
        return _native_model(converted)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _unpickle, (type(self).__bases__[1],), self.__dict__

    def save_pretrained(self, save_directory: str | os.PathLike, *arguments: Any, **keys: Any) -> None:
        """As in transformers, with the family's names and layouts. On a mesh all ranks call it, and rank 0 writes.

        Raises:
            ValueError: no family computes this.
        """
        try:
            model = _native_model(self)
        except UserError as error:
            raise UserError(f"save_pretrained: {error}; {_HOW}") from error
        state = keys.pop("state_dict", None)
        if state is None and any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            state = get_model_state_dict(self, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if not state:
                return
        if model.generation_config is not None and self.generation_config is not None:
            model.generation_config.update(**self.generation_config.to_dict())
        model.load_state_dict(dict(self.state_dict() if state is None else state), assign=True)
        model.save_pretrained(save_directory, *arguments, **keys)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Called by `load_state_dict` of this module or one around it; `lists`: missing, unexpected, errors."""
        _take_family_names(self, state_dict, prefix, missing=lists[0], errors=lists[2])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)


@torch.no_grad()
def _take_family_names(
    converted: nn.Module, state_dict: dict[str, Any], prefix: str, *, missing: list[str], errors: list[str]
) -> None:
    """Fills the model from tensors of `state_dict` under its family's names, and puts ours in their place.

    One file of a sharded checkpoint may hold a part of a tensor of ours; the rest keeps its values.
    """
    own = converted.state_dict()
    unknown = {name for name in state_dict if name.startswith(prefix)} - {prefix + name for name in own}
    if not unknown:
        return
    blocks, why = [plain_name(name) for name in named_moe_layers(converted)], ""
    sources: dict[str, list[WeightPart]] = {}
    try:
        native = native_of_model(converted)
        targets = native.targets({name: tuple(tensor.shape) for name, tensor in own.items()})
        sources = by_tensor(part for target in targets if target.name not in own for part in target.parts)
        blocks += [native.family.block_name(layer) for layer in native.blocks.layers]
    except UserError as error:
        why = f": {error}"
    for ours, parts in sources.items():
        there = [part for part in parts if prefix + part.theirs in unknown]
        tensor = own[ours]
        if not there:
            continue
        if isinstance(tensor, DTensor):
            errors.append(f"{there[0].theirs}: the model is on a mesh; load weights of its family before that")
            return
        if tensor.is_meta:
            tensor = torch.full_like(tensor, torch.nan, device="cpu")
        for part in there:
            shape = tuple(state_dict[prefix + part.theirs].shape)
            if shape != part.their_shape:
                errors.append(f"size mismatch for {part.theirs}: {shape}, and the model has {part.their_shape}")
                continue
            at = tensor[part.of_ours]
            fill(at, (0,) * at.dim(), [replace(part, expert=None)], lambda name: state_dict[prefix + name])
        missing += [prefix + part.theirs for part in parts if part not in there]
        state_dict[prefix + ours] = tensor
    taken = unknown & {prefix + part.theirs for parts in sources.values() for part in parts}
    for name in taken:
        del state_dict[name]
    lost = sorted(name for name in unknown - taken if name.startswith(tuple(f"{prefix}{block}." for block in blocks)))
    if lost:
        errors.append(f"{lost[0]} and {len(lost) - 1} more tensors have no place in the model's dMoE layers{why}")


def _native_model(converted: nn.Module) -> Any:
    """The family's model without weights; its `load_state_dict` takes the tensors of a model with dMoE layers."""
    if int(transformers.__version__.partition(".")[0]) >= 5:
        raise UserError(
            f"transformers {transformers.__version__} names and packs experts in another way; use transformers 4"
        )
    native = native_of_model(converted)
    from transformers.modeling_utils import init_empty_weights  # which transformers 5 lacks

    with init_empty_weights(include_buffers=False):  # a state dict does not hold all buffers
        model = getattr(transformers, native.family.architecture)(native.config)
    buffers = {plain_name(name): buffer for name, buffer in converted.named_buffers()}
    model.load_state_dict = partial(_load_ours, model, native, buffers)
    # FSDP2's classes call it once more, with the converted model's configuration
    model.__init__ = lambda *_, **__: None
    return model


def _load_ours(
    model: Any,
    native: Native,
    buffers: Mapping[str, Tensor],
    state_dict: Mapping[str, Tensor],
    strict: bool = True,
    assign: bool = False,
) -> Any:
    """Takes the tensors out of `state_dict`, so that both formats are never whole in memory at once.

    Args:
        buffers: of the converted model, which take the place of roundings of them where the family keeps fp32.
    """

    def exact(name: str) -> Tensor:
        rounded, own = state_dict[name], buffers.get(plain_name(name))
        if own is None or own.dtype == rounded.dtype or not torch.equal(own.to(rounded), rounded):
            return rounded
        return own.to(rounded.device)

    targets = native.targets({name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    left = Counter(part.ours for target in targets for part in target.parts)
    theirs: dict[str, Tensor] = {}
    for target in targets:
        theirs[target.name] = assemble(target, exact if target.keeps_dtype else state_dict.__getitem__).clone()
        for part in target.parts:
            left[part.ours] -= 1
            if not left[part.ours] and isinstance(state_dict, dict):
                del state_dict[part.ours]
    if getattr(model.config, "tie_word_embeddings", False) and model.get_output_embeddings() is not None:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    if model.generation_config is not None:
        model.generation_config.use_cache = True  # a trainer turns it off for the training
    del model.load_state_dict  # this function, by which the model would refer to itself
    return model.load_state_dict(theirs, strict=strict, assign=assign)
