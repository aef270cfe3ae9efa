"""Differentiable operations of an MoE layer, and the choice of backend that computes them."""

from foundry_moe.ops.mlp import Biases, expert_mlp, packed_mlp
from foundry_moe.ops.permute import PermutePlan, permute, plan_permute, unpermute
from foundry_moe.ops.unfused import POINTWISE

__all__ = ["POINTWISE", "Biases", "PermutePlan", "expert_mlp", "packed_mlp", "permute", "plan_permute", "unpermute"]
