"""Differentiable operations of an MoE layer, and the choice of backend that computes them."""

from foundry_moe.ops.mlp import routed_mlp
from foundry_moe.ops.routes import Routes, combine, permute, plan_routes

__all__ = ["Routes", "combine", "permute", "plan_routes", "routed_mlp"]
