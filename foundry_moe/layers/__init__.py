"""The MoE layer and its parts. Independent of ranks, world sizes and Composer."""
