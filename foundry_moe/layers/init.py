"""Initial weights that depend on (seed, layer, expert) alone: never on the rank, the mesh or earlier draws.

CPU and CUDA generators differ, so all weights of a process are drawn on one kind of device: see `drawing_device`.
Independent of modules; callers copy the drawn matrices, whole or in part.
"""

import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor


def drawing_device(device: torch.device) -> torch.device:
    """Where values for a tensor on `device` are drawn: on the GPU, also for a tensor that is still on the CPU.

    On the CPU only where there is no GPU, or the process group is not NCCL's: the process trains on the CPU then.
    """
    if device.type != "cpu" or not torch.cuda.is_available():
        return device
    grouped = dist.is_available() and dist.is_initialized()
    return device if grouped and "nccl" not in dist.get_backend_config() else torch.device("cuda")


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
    """A fp32 matrix from N(0, std^2) for a tensor on `device`; it is on the device where it was drawn."""
    device = drawing_device(device)
    key = f"{seed}/{layer}/{name}/{expert}".encode()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)  # 63 bits
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(std)


def residual_std(std: float, num_layers: int) -> float:
    """The deviation of projections to the residual stream: std / sqrt(2 layers) (Radford et al. 2019, section 2.3)."""
    return std / math.sqrt(2 * num_layers)
