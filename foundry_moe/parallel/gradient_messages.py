"""Sends gradients between ranks in their own dtype, and sums them in the dtype of FSDP2's reduction.

FSDP2 casts gradients, for example from bf16 to fp32, and sends those. Here each rank casts and sums what it has
received: half the bytes, and the same values up to the order of the sums, since the cast is exact. Megatron-Core's
`reduce_scatter_with_fp32_accumulation` sends its shards in this way. Independent of meshes, experts and Composer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from foundry_moe_kernels.mean import mean
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from foundry_moe.parallel.one_pass_cast import shard_group_alone

try:  # private (torch 2.11)
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
except ImportError:  # torch 2.7
    ReduceScatter = None  # type: ignore[assignment, misc]


class GradientMessages(ReduceScatter or object):  # type: ignore[misc]
    """FSDP2's reduction of one module's gradients: over shards, or over two replicas of weights that are not sharded.

    Call `begin` before each backward pass. All ranks must have equally many microbatches. Gradients that others than
    `MeshGradients` accumulate are sent in `dtype`, too.

    Args:
        group: FSDP2's group of the module's parameters.
        dtype: of the gradients that autograd computes.
        replicas: the group of two ranks that have the same, unsharded weights; None = the weights are sharded.
    """

    # gradients of two replicas that are sent, and the end of it: memory of another stream than the one that reads it
    _held: ClassVar[tuple[Tensor, torch.cuda.Event] | None] = None

    def __init__(self, group: Any, dtype: torch.dtype, replicas: ProcessGroup | None = None) -> None:
        self.group = group
        self.dtype = dtype
        self.replicas = replicas
        self._sums = False
        self._laid_out: Tensor | None = None
        self._reduced_in = torch.float32

    def begin(self, *, sums: bool) -> None:
        """A backward pass begins.

        Args:
            sums: FSDP2 has added up gradients of earlier microbatches, in the dtype of the reduction, and sends it.
        """
        self._sums, self._laid_out = sums, None

    @classmethod
    def release(cls) -> None:
        """Frees the gradients that were sent last, once the current stream gets to this call."""
        if cls._held is not None:
            _, sent = cls._held
            torch.cuda.current_stream().wait_event(sent)
            cls._held = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of a reduction: FSDP2 calls this twice, for the gradients and for their average."""
        laid_out, self._laid_out, self._reduced_in = self._laid_out, None, dtype
        if laid_out is None:
            GradientMessages.release()
            cast = self._sums or self.group.gradient_divide_factor is not None
            self._laid_out = torch.empty(*size, dtype=dtype if cast else self.dtype, device=device)
            return self._laid_out
        # over a shard group of one rank FSDP2 copies the first to the second, which does nothing if they are the same
        return torch.empty(*size, dtype=dtype, device=device) if self.replicas is None else laid_out

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduces over shards."""
        if op != dist.ReduceOp.AVG:  # FSDP2 divides itself, for example in fp64
            input_tensor = input_tensor.to(output_tensor.dtype)
        if input_tensor.dtype == output_tensor.dtype:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
            return
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, rest = received.tensor_split([output_tensor.numel()])
        _mean(first, rest, output_tensor)

    def average(self, gradients: Tensor) -> None:
        """Averages over replicas, in place: afterwards the gradients are in the dtype of the reduction."""
        assert self.replicas is not None
        if gradients.dtype == self._reduced_in:
            if gradients.is_cuda:
                gradients.record_stream(torch.cuda.current_stream())  # FSDP2 has allocated them in another one
            divided = self.group.gradient_divide_factor is not None  # by FSDP2
            op = dist.ReduceOp.SUM if divided else dist.ReduceOp.AVG
            dist.all_reduce(gradients, op=op, group=self.replicas)
            return
        received, numel = torch.empty_like(gradients), gradients.numel()
        to = [0, numel] if dist.get_rank(self.replicas) == 0 else [numel, 0]
        dist.all_to_all_single(received, gradients, to, to, group=self.replicas)
        averaged = torch.empty_like(gradients, dtype=self._reduced_in)
        _mean(gradients, received, averaged)
        if gradients.is_cuda:
            GradientMessages._held = gradients.detach(), torch.cuda.current_stream().record_event()
        gradients.data = averaged


def _mean(first_N: Tensor, rest: Tensor, out_N: Tensor) -> None:
    """Writes the mean of `first_N` and the numbers in `rest`, which follow each other N by N."""
    if first_N.is_cuda and out_N.dtype == torch.float32:
        mean(first_N, rest, out_N)
    else:
        rows = torch.cat((first_N, rest)).view(-1, len(first_N))
        torch.mean(rows, 0, dtype=out_N.dtype, out=out_N)


def send_own_dtype(module: FSDPModule, dtype: torch.dtype, ranks_per_node: int) -> GradientMessages | None:
    """Makes FSDP2 reduce a module's gradients through `GradientMessages`, where these send fewer bytes.

    That is so for shards over a group within one node, and over one that has each rank on a node of its own: over
    others a ring sums on each node what it sends to the next one, where here each rank would send its own. It is so for
    two replicas of weights that are not sharded: each is sent the gradients of the other.

    Args:
        dtype: of the gradients, smaller than the one that they are reduced in.

    Returns:
        None if FSDP2 reduces the gradients itself, as it always does in torch 2.7.
    """
    group = module._get_fsdp_state()._fsdp_param_group  # private (torch 2.7 to 2.11)
    if ReduceScatter is None or group is None:
        return None
    mesh: Any = group.mesh_info
    if not isinstance(mesh, FSDPMeshInfo):
        return None
    if mesh.shard_mesh_size > 1:
        if not _is_even(mesh.shard_process_group, ranks_per_node):
            return None
        messages = GradientMessages(group, dtype)
    else:
        if not isinstance(mesh, HSDPMeshInfo) or mesh.replicate_mesh_size != 2:
            return None
        messages = GradientMessages(group, dtype, mesh.replicate_process_group)
        # so that FSDP2 calls the hook in place of its own reduction over replicas
        alone = shard_group_alone(mesh)
        if group.post_forward_mesh_info == mesh:
            group.post_forward_mesh_info = alone
        group.mesh_info = alone
        module.set_all_reduce_hook(messages.average)
    module.set_custom_reduce_scatter(messages)
    return messages


def _is_even(group: ProcessGroup, ranks_per_node: int) -> bool:
    """Whether a group's ranks are all on one node, or each on its own."""
    nodes = {rank // ranks_per_node for rank in dist.get_process_group_ranks(group)}
    return len(nodes) in (1, group.size())
