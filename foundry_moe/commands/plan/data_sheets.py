"""Constants of GPUs that nobody has measured, in proportion to an H200's: the best guess before `plan --calibrate`."""

from __future__ import annotations

from dataclasses import replace

from foundry_moe.commands.plan.constants import Constants, Link

# dense bf16 TFLOP/s, memory TB/s, GB/s one way between two GPUs of a host; from NVIDIA's data sheets
SHEETS = {
    "h200": (989, 4.8, 450),
    "a100": (312, 2.04, 300),
    "a10": (125, 0.6, 32),
    "l40s": (362, 0.864, 32),
    "b200": (2250, 8.0, 900),
    "rtx-pro-6000": (504, 1.79, 64),
}


def scaled(h200: Constants, chip: str) -> Constants:
    """An H200's constants times the ratios of the data sheets.

    Args:
        chip: a name in `SHEETS`.
    """
    flops, memory, wire = (new / old for new, old in zip(SHEETS[chip], SHEETS["h200"], strict=True))

    def link(old: Link) -> Link:
        return replace(old, bytes_per_s=wire * old.bytes_per_s)

    return replace(
        h200,
        device=chip,
        source="an H200's, in proportion to the data sheets",
        assumed=("everything",),
        dense_flops_per_s={width: flops * rate for width, rate in h200.dense_flops_per_s.items()},
        expert_flops_per_s={width: flops * rate for width, rate in h200.expert_flops_per_s.items()},
        attention_flops_per_s=flops * h200.attention_flops_per_s,
        memory_bytes_per_s=memory * h200.memory_bytes_per_s,
        all_to_all=link(h200.all_to_all),
        all_gather=link(h200.all_gather),
        reduce_scatter=link(h200.reduce_scatter),
    )
