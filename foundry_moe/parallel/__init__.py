"""Spreads a model with MoE layers over a (replicate, shard, expert) mesh, from outside: layers ask for no rank.

mesh.py plans and validates, placement.py shards parameters, all_to_all_dispatcher.py moves tokens, gradients.py scales,
measures and clips gradients.
"""
