"""Triton kernels of Mixture-of-Experts layers: products of experts, permute, top-k, routers, dispatch plans.

Needs torch and Triton alone; importing needs no GPU. Each kernel has a plain torch twin: that of an expert product or
of an activation is in `reference`, that of an operator in the file of the same name in `foundry_moe/ops/`.
"""
