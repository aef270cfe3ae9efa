"""Names for `dispatch_plan` and `peer_rows`, until these import them from `launch`."""

from foundry_moe_kernels.launch import cdiv, next_power_of_2

__all__ = ["cdiv", "next_power_of_2"]
