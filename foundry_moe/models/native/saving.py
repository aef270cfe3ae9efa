"""Makes `save_pretrained` and LLM Foundry's `hf_checkpointer` save a model with dMoE layers as its family.

LLM Foundry makes a second model, `type(model)(config)`, loads the first one's whole state dict into it and saves it.
So the converted model gets a class of its own, a subclass of what it was: called with a configuration it makes the
family's native model, which loads our state dict. If no family computes the same, both raise.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from foundry_moe.models.native.architecture import architecture_of
from foundry_moe.models.native.state_dict import Native, native_of
from foundry_moe.models.native.targets import assemble

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
            module.save_pretrained = partial(_refuse, f"this {was.__name__} is a part of a model with dMoE layers")
        elif not was.__name__.endswith("ForCausalLM"):
            module.save_pretrained = partial(_refuse, f"no family of Hugging Face MoE models has a {was.__name__}")
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
    """The family that a model in memory is exported as.

    Raises:
        ValueError: no family computes this; names the key that prevents it and a valid value.
    """
    architecture = architecture_of(model)
    if architecture is None:
        raise ValueError(f"{type(model).__name__} has no dMoE layers, or is no Hugging Face model")
    return native_of(architecture)


def _refuse(reason: str, *_: Any, **__: Any) -> None:
    how = "save the whole model" if reason.startswith("this") else _HOW
    raise ValueError(f"save_pretrained: {reason}; {how}")


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
        except ValueError as error:
            raise ValueError(f"save_pretrained: {error}; {_HOW}") from error
        state = keys.pop("state_dict", None)
        if state is None and any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            state = get_model_state_dict(self, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if not state:
                return
        model.load_state_dict(dict(self.state_dict() if state is None else state), assign=True)
        if model.generation_config is not None and self.generation_config is not None:
            model.generation_config.update(**self.generation_config.to_dict())
        model.save_pretrained(save_directory, *arguments, **keys)


def _native_model(converted: nn.Module) -> Any:
    """The family's model without weights; its `load_state_dict` takes the tensors of a model with dMoE layers."""
    if int(transformers.__version__.partition(".")[0]) >= 5:
        raise ValueError(
            f"transformers {transformers.__version__} names and packs experts in another way; use transformers 4"
        )
    native = native_of_model(converted)
    with _empty_weights():
        model = getattr(transformers, native.family.architecture)(native.config)
    model.load_state_dict = partial(_load_ours, model, native)
    # FSDP2's classes call it once more, with the converted model's configuration
    model.__init__ = lambda *_, **__: None
    return model


@contextlib.contextmanager
def _empty_weights() -> Iterator[None]:
    """Parameters are made on the meta device. Buffers are real: a state dict does not hold all of them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _load_ours(
    model: Any, native: Native, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
) -> Any:
    """Takes the tensors out of `state_dict`, so that both formats are never whole in memory at once."""
    targets = native.targets({name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    left = Counter(part.ours for target in targets for part in target.parts)
    theirs: dict[str, Tensor] = {}
    for target in targets:
        theirs[target.name] = assemble(target, state_dict.__getitem__).clone()
        for part in target.parts:
            left[part.ours] -= 1
            if not left[part.ours] and isinstance(state_dict, dict):
                del state_dict[part.ours]
    if getattr(model.config, "tie_word_embeddings", False) and model.get_output_embeddings() is not None:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    del model.load_state_dict  # this function, by which the model would refer to itself
    return model.load_state_dict(theirs, strict=strict, assign=assign)
