"""A model's transformer blocks: the order in which FSDP2 prefetches them, and their compilation.

Depends on FSDP2 and MoE layers; independent of meshes and Composer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from foundry_moe.layers.lookup import moe_layers
from foundry_moe.ops.operators import operator

# of `torch.compile`: a block waits for a sum of loads over ranks at its end, not where the sum begins
SINK_WAITS = {
    "options": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
    }
}


def block_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost module lists that contain MoE layers: their members are the model's blocks."""
    layers = set(moe_layers(model))
    found: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside and layers & set(module.modules()):
            found.append(module)
            inside |= set(module.modules())
    return found


def prefetch_in_order(model: nn.Module) -> None:
    """Makes FSDP2 gather weights one block ahead, forward and backward. Call it once FSDP2 has wrapped the model.

    By default FSDP2 prefetches, backward, the unit that came before in the forward pass. The experts of a block come
    first in its backward pass, so they would be gathered only when they are needed. Here a block's experts prefetch the
    whole previous block. Forward, a block prefetches its own experts, since the host may wait in dispatch before them.
    """
    for blocks in block_lists(model):
        units = [unit for unit in map(wrapped_modules, blocks) if unit]
        for before, unit in pairwise(units):
            before[0].set_modules_to_forward_prefetch([*before[1:], unit[0]])
            unit[-1].set_modules_to_backward_prefetch(before)
        if units:
            units[-1][0].set_modules_to_forward_prefetch(units[-1][1:])
            root = wrapped_modules(model)[0]
            if root is not units[0][0]:
                root.set_modules_to_backward_prefetch(units[-1])


def wrapped_modules(module: nn.Module) -> list[Any]:
    """The modules that FSDP2 has wrapped, outermost first."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def disable_hooks_once(module: Any) -> None:
    """Takes FSDP2's forward hooks of a module that it wraps out of dynamo's sight once and for all.

    FSDP2 does so at each call, with a new `torch._dynamo.disable`: some 0.05 ms of the host, twice per module and pass.
    """
    state = module._get_fsdp_state()  # private (torch 2.7 to 2.15)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is state and hasattr(hook, "__wrapped__"):
                hooks[key] = torch.compiler.disable(MethodType(hook.__wrapped__, state))


def _fake(positions_BS, inv_freq, scaling, like):  # type: ignore[no-untyped-def]
    shape = (*positions_BS.shape, 2 * inv_freq.shape[0])
    return like.new_empty(shape), like.new_empty(shape)


@operator("rotary_tables", _fake)
def rotary_tables(positions_BS: Tensor, inv_freq: Tensor, scaling: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of rotary position embeddings (Su et al. 2021, arXiv 2104.09864): cos_BSD and sin_BSD, in `like`'s dtype.

    Cosines and sines of position * frequency, times `scaling`, computed in fp32. One operator, opaque to
    `torch.compile`, which would otherwise fuse the cosines into their uses and recompute them for every head.

    Args:
        inv_freq: [D / 2]; each half of a head's width has all of them.
    """
    with torch.autocast(positions_BS.device.type, enabled=False):
        angles_BSF = positions_BS[..., None] * inv_freq.to(positions_BS.device).float()
        angles_BSD = torch.cat((angles_BSF, angles_BSF), dim=-1)
        if scaling != 1:
            return (angles_BSD.cos() * scaling).to(like.dtype), (angles_BSD.sin() * scaling).to(like.dtype)
        cos_BSD, sin_BSD = (like.new_empty(angles_BSD.shape) for _ in range(2))
        return torch.cos(angles_BSD, out=cos_BSD), torch.sin(angles_BSD, out=sin_BSD)  # cast as they are written


# rotary embeddings of transformers whose frequencies do not depend on the sequence length
_FIXED_FREQUENCIES = ("default", "linear", "llama3", "yarn")


def hide_rotary_tables(model: nn.Module) -> int:
    """Makes rotary embeddings of transformers compute their tables in one operator, with the same values.

    Returns:
        The number of embeddings changed.
    """
    found = 0
    for module in model.modules():
        if getattr(module, "rope_type", None) in _FIXED_FREQUENCIES and hasattr(module, "inv_freq"):
            module.forward = partial(_tables, module)  # type: ignore[method-assign]
            found += 1
    return found


def _tables(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return rotary_tables(position_ids, module.inv_freq, module.attention_scaling, x)


def _first_pass(block: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A compiled block's first forward pass. Its weights have their memory now, and the sums of loads must follow."""
    for layer in moe_layers(block):
        layer.move_statistics()
    if getattr(block.forward, "func", None) is _first_pass:  # nothing has wrapped it meanwhile
        block.forward = compiled
    return compiled(*args, **kwargs)


def allow_compilations(blocks: int) -> None:
    """Raises dynamo's limits: blocks share code objects, whose compilations it counts for all blocks together."""
    needed = 4 * blocks
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, needed)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, needed * 8)


def _compile(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A block's compiled forward pass: of LLM Foundry's, which breaks where tokens are sent, two graphs and not four.

    That takes nested breaks, with which torch 2.11 and 2.15 compute something else where a function that `map` calls
    breaks the graph. LLM Foundry's blocks have no such function; others may.
    """
    compiled = torch.compile(forward, **options)
    if forward.__module__.startswith("llmfoundry.") and torch.__version__ >= "2.11":
        return torch._dynamo.config.patch(nested_graph_breaks=True)(compiled)
    return compiled


def _changed(method: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """A module's method, changed as a function and bound to the module again.

    A deep copy of the module (Composer's SWA makes one) then has its own. A function would be shared, with the weights
    of the original.
    """
    return MethodType(change(method.__func__), method.__self__) if isinstance(method, MethodType) else change(method)


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compiles each block's forward pass in place, so that names, hooks and FSDP2's wrapping stay.

    With expert parallelism a block's graph breaks at the dispatch.

    Args:
        options: of `torch.compile`.

    Returns:
        The number of blocks.
    """
    hide_rotary_tables(model)
    members = [block for blocks in block_lists(model) for block in blocks]
    allow_compilations(len(members))
    for block in members:
        compiled = _changed(block.forward, partial(_compile, **options))
        block.forward = partial(_first_pass, block, compiled)  # type: ignore[method-assign]
    for layer in moe_layers(model):
        if not layer.chooses_by_tokens_alone:  # else values of one layer or batch become constants
            layer.choose = _changed(layer.choose, torch.compiler.disable)  # type: ignore[method-assign]
        if (shared := layer.shared_expert) is not None:  # with expert parallelism its caller is not compiled
            shared.forward = _changed(shared.forward, partial(torch.compile, **options))  # type: ignore[method-assign]
    return len(members)
