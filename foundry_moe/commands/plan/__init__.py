"""`foundry-moe plan`: mesh, memory, messages and time of a run, before it starts."""
