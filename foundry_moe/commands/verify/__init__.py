"""`foundry-moe verify`: training on a mesh compared with training on one process."""
