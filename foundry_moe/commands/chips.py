"""Compute capabilities of GPUs, by the names that `foundry-moe plan --chip` knows."""

CHIPS = {
    "a100": (8, 0),
    "a10": (8, 6),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "rtx-pro-6000": (12, 0),
}
