"""GPUs by the names that `foundry-moe plan --chip` knows: compute capabilities, and memory."""

CHIPS = {
    "a100": (8, 0),
    "a10": (8, 6),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "rtx-pro-6000": (12, 0),
}

# GiB that CUDA gives, below what the data sheets print; of an A100 the larger one
MEMORY_GIB = {"a100": 80.0, "a10": 22.0, "l40s": 44.0, "h100": 80.0, "h200": 139.0, "b200": 178.0, "rtx-pro-6000": 95.0}
