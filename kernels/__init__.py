"""Triton kernels of Mixture-of-Experts layers: products of experts, permute, top-k, gates, dispatch plans.

Needs torch and Triton alone; importing needs no GPU. Each kernel has a plain torch version: for an operator in the file
of the same name in `foundry_moe/ops/`, for a product or an activation in `tests/helpers/kernel_twins.py`.
"""
