"""Places a model with MoE layers on a (replicate, shard, expert) mesh, from outside: layers have no rank.

mesh.py plans and validates, placement.py shards parameters, all_to_all.py dispatches tokens, gradients.py scales,
measures and clips gradients.
"""
