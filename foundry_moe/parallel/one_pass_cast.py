"""Casts weights that FSDP2 shards over a single rank in one pass instead of two.

FSDP2 casts such a weight to a temporary and copies it. Its protocol of `fsdp_pre_all_gather` and `fsdp_post_all_gather`
lets a tensor subclass write the cast where FSDP2 reads it. Independent of experts and meshes.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

try:  # private (torch 2.7 to 2.11)
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
except ImportError:
    FSDPMeshInfo = ()  # type: ignore[assignment, misc]


class _SingleRankWeight(Tensor):
    """A stored weight that this rank holds whole. Results of operations on it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        return (self.new_empty(0),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        with torch.no_grad():
            if out is None:  # first call; later FSDP2 passes `out`, whose memory it frees between passes
                cast = torch.empty(self.shape, dtype=dtype, device=self.device).copy_(self)
                return cast, (cast,)
            local = out.to_local() if isinstance(out, DTensor) else out
            with torch.autograd._unsafe_preserve_version_counter(local):  # the backward pass uses the same values
                local.copy_(self)
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # so that a checkpoint does not need this package

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)


# FSDP2 inspects this signature at every gather: 9 us with the attribute, 23 us without
_SingleRankWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(_SingleRankWeight.fsdp_pre_all_gather)  # type: ignore[attr-defined]


def can_cast_in_one_pass() -> bool:
    """Whether the installed torch's FSDP2 uses the protocol for a shard group of one rank.

    torch 2.7 gathers over one rank as well, which needs plain tensors; some later versions copy without the protocol.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def cast_in_one_pass(module: nn.Module) -> None:
    """Makes FSDP2 cast a module's weights in one pass. The module is wrapped over shard groups of one rank.

    The parameters stay the same objects. No effect where `can_cast_in_one_pass` is false.
    """
    if not can_cast_in_one_pass():
        return
    _mark(module)
    module.register_load_state_dict_post_hook(lambda module, _: _mark(module))  # it may assign other tensors
    # private: nn.Module has no public hook for `to`, `half` and so on (torch 2.7 to 2.11), which leave plain tensors
    convert = module._apply

    def convert_and_mark(*args: Any, **options: Any) -> nn.Module:
        convert(*args, **options)
        _mark(module)
        return module

    module._apply = convert_and_mark  # type: ignore[method-assign]


def slice_mesh_once(module: Any) -> None:
    """Slices the mesh of a module that FSDP2 wraps, if shard groups have one rank, so that FSDP2 need not do so.

    It hands the mesh of the shard group to each weight of `cast_in_one_pass`, and would slice it at each gather: 0.14
    ms a weight on the host. Later versions than 2.11 keep it.
    """
    group = module._get_fsdp_state()._fsdp_param_group  # private (torch 2.7 to 2.11)
    info: Any = None if group is None else group.mesh_info
    if not can_cast_in_one_pass() or not isinstance(info, FSDPMeshInfo) or info.shard_mesh_size > 1:
        return
    if info.mesh.ndim > 1:
        alone = shard_group_alone(info)
        for weight in group.fsdp_params:
            weight.mesh_info = alone


def shard_group_alone(info: Any) -> Any:
    """FSDP2's `HSDPMeshInfo` without its replicas."""
    return FSDPMeshInfo(info.mesh[info.mesh.mesh_dim_names[-1]], shard_mesh_dim=0)


def _mark(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        parameter._local_tensor = parameter._local_tensor.as_subclass(_SingleRankWeight)
