"""`decoupled_adamw_fused`: Composer's DecoupledAdamW in one pass over each parameter, also on different meshes.

Composer's DecoupledAdamW launches six kernels and synchronises the host once for each parameter; torch's fused AdamW
refuses lists of DTensors on different meshes.
"""

from composer.optim import DecoupledAdamW

from foundry_moe.optim.adamw import FusedAdamW


class DecoupledAdamWFused(FusedAdamW, DecoupledAdamW):
    """DecoupledAdamW in one kernel per parameter; the same keys, state and checkpoints.

    YAML: `optimizer: {name: decoupled_adamw_fused, lr: 4.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 1.0e-5}`
    """
