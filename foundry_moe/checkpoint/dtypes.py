"""The dtypes that a checkpoint may hold, by their names in it."""

import torch

from foundry_moe.checkpoint.strict import ITEM_BYTES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
