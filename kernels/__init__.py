"""Triton kernels of dropless Mixture-of-Experts layers: block-sparse products, ragged permutation, top-k.

Needs torch and triton alone; importing needs no GPU. Every kernel has its plain torch twin in `reference`.
"""
