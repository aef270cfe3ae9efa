"""The MoE layer and its parts. Nothing here asks for a rank, a world size or Composer."""
