"""Tables of rotary position embeddings (Su et al. 2021, arXiv 2104.09864) as one operator.

`torch.compile` does not look into it: fused into what uses them, cosines would be computed anew for every head.

Shapes: B sequences, S positions, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_moe.ops.operators import operator


def _fake(positions_BS, inv_freq, scaling, like):  # type: ignore[no-untyped-def]
    shape = (*positions_BS.shape, 2 * inv_freq.shape[0])
    return like.new_empty(shape), like.new_empty(shape)


@operator("rotary_tables", _fake)
def rotary_tables(positions_BS: Tensor, inv_freq: Tensor, scaling: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos_BSD and sin_BSD of angles position * frequency, times `scaling`, in the dtype of `like`; computed in fp32.

    Args:
        inv_freq: [D / 2]; each half of a head's width has all of them.
    """
    with torch.autocast(positions_BS.device.type, enabled=False):
        angles_BSF = positions_BS[..., None].float() * inv_freq.to(positions_BS.device).float()
        angles_BSD = torch.cat((angles_BSF, angles_BSF), dim=-1)
        return (angles_BSD.cos() * scaling).to(like.dtype), (angles_BSD.sin() * scaling).to(like.dtype)
