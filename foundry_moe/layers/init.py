"""Initial weights that depend on (seed, layer, expert) alone: never on the rank, the mesh or earlier draws.

Independent of modules; callers copy the drawn matrices, whole or in part.
"""

import hashlib
import math

import torch
from torch import Tensor


def normal_matrix(
    shape: tuple[int, ...],
    std: float,
    *,
    seed: int,
    layer: int,
    name: str,
    expert: int = 0,
    device: torch.device,
) -> Tensor:
    """A fp32 matrix from N(0, std^2), drawn on `device`: CPU and CUDA differ, ranks do not."""
    key = f"{seed}/{layer}/{name}/{expert}".encode()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)  # 63 bits
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(std)


def residual_std(std: float, num_layers: int) -> float:
    """The deviation of projections to the residual stream: std / sqrt(2 layers) (Radford et al. 2019, section 2.3)."""
    return std / math.sqrt(2 * num_layers)
