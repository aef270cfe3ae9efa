"""Differentiable operations of an MoE layer, and the choice of backend that computes them."""

from foundry_moe.ops.mlp import expert_mlp
from foundry_moe.ops.permute import PermutePlan, permute, plan_permute, unpermute

__all__ = ["PermutePlan", "expert_mlp", "permute", "plan_permute", "unpermute"]
