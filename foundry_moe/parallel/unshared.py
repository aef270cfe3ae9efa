"""Casts weights that FSDP2 shards over one rank straight into what it computes with: one pass in place of two.

Knows FSDP2's protocol for tensors that take part in its gathers. Must not know experts or meshes.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class _UnsharedWeight(Tensor):
    """A stored weight of which this rank has all that FSDP2 gathers. Results of operations are plain tensors.

    FSDP2 would cast it to a temporary, which it copies; here nothing is gathered, and the cast writes the copy.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        return (self.new_empty(0),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        with torch.no_grad():
            if out is None:  # the first time; FSDP2 frees its memory between passes and asks for `out` to be filled
                cast = torch.empty(self.shape, dtype=dtype, device=self.device).copy_(self)
                return cast, (cast,)
            local = out.to_local() if isinstance(out, DTensor) else out
            with torch.autograd._unsafe_preserve_version_counter(local):  # backward passes find the forward's values
                local.copy_(self)
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # a file needs nothing of this package

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)


# FSDP2 asks at every gather, which takes 9 us so and 23 without
_UnsharedWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(_UnsharedWeight.fsdp_pre_all_gather)  # type: ignore[attr-defined]


def can_cast_directly() -> bool:
    """Whether the installed torch's FSDP2 asks a weight how to gather it where there is one rank.

    That of 2.7 gathers over one rank too, which needs whole tensors; some later ones copy without asking.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def cast_directly(module: nn.Module) -> None:
    """Has FSDP2 cast a module's weights in one pass. Call it on a module wrapped over shard groups of one rank.

    The parameters stay the same objects. Does nothing with a torch that cannot: see `can_cast_directly`.
    """
    if not can_cast_directly():
        return
    _mark(module)
    module.register_load_state_dict_post_hook(lambda module, _: _mark(module))  # which may assign other tensors
    convert = module._apply

    def convert_and_mark(*args: Any, **options: Any) -> nn.Module:
        convert(*args, **options)  # `to`, `half` and so on, which leave plain tensors
        _mark(module)
        return module

    module._apply = convert_and_mark  # type: ignore[method-assign]


def _mark(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        parameter._local_tensor = parameter._local_tensor.as_subclass(_UnsharedWeight)
