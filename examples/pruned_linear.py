"""Trains a small MLP, removes half of the blocks of its weights, and trains the blocks that are left.

    python examples/pruned_linear.py

Runs on a CPU in plain torch and on a GPU on the block-sparse kernels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe.sparse import Matrix, dds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, HIDDEN, BLOCK = 64, 256, 16


class BlockSparseLinear(nn.Module):
    """x Wᵀ with those blocks of W [out, in] that have the largest norm; the others are zeros and stay zeros."""

    def __init__(self, weight: Tensor, keep: float) -> None:
        super().__init__()
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [M, B, N, B]
        norms_MN = blocks.norm(dim=(1, 3))
        mask_MN = norms_MN > norms_MN.flatten().quantile(1 - keep)
        self.matrix = Matrix.from_dense(weight, block=BLOCK, mask_MN=mask_MN)
        self.values = nn.Parameter(self.matrix.values)  # [Z, B, B], what the optimizer sees

    def forward(self, x: Tensor) -> Tensor:
        return dds(x, self.matrix.with_values(self.values).mT)


def train(model: nn.Module, teacher: nn.Module, steps: int) -> float:
    """The loss at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(256, WIDTH, device=DEVICE)
        loss = F.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DEVICE).requires_grad_(False)
up, down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
dense = nn.Sequential(up, nn.GELU(), down).to(DEVICE)
print(f"dense: loss {train(dense, teacher, 300):.4f}")
with torch.no_grad():
    pruned = nn.Sequential(*(BlockSparseLinear(one.weight, keep=0.5) if one is not dense[1] else one for one in dense))
blocks = sum(one.values.shape[0] for one in pruned if isinstance(one, BlockSparseLinear))
print(f"pruned to {blocks} of {2 * WIDTH * HIDDEN // BLOCK**2} blocks: loss {train(pruned, teacher, 1):.4f}")
print(f"trained on: loss {train(pruned, teacher, 300):.4f}")
