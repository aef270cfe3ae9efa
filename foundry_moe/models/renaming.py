"""A Hugging Face model's tensors under the names and in the layouts that a run of `hf_causal_lm` has them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from foundry_moe.models.families import FAMILIES
from foundry_moe.models.filling import by_tensor, fill

ROOT = "model."  # where LLM Foundry's wrapper holds the Hugging Face model


def renaming_of(folder: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """How the tensors of a folder are named in a run; None where it is no model of a family of ours.

    Raises:
        ValueError: its configuration is of a family of ours, and says what our layers do not compute.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        model_type = json.loads(path.read_bytes()).get("model_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if model_type not in FAMILIES:
        return None
    from transformers import AutoConfig

    family = FAMILIES[model_type]
    blocks = family.read(AutoConfig.from_pretrained(folder))

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes tensors out of its argument as it goes on: they are held once, but for those of one layer."""
        renamed = {}
        for layer in blocks.layers:
            prefix = family.block_name(layer) + "."
            for ours, parts in by_tensor(family.parts(blocks)).items():
                for part in parts:
                    found = tensors.get(prefix + part.theirs)
                    if found is None or tuple(found.shape) != part.their_shape:
                        has = "no tensor" if found is None else f"shape {list(found.shape)} for"
                        raise ValueError(
                            f"{folder} has {has} {prefix}{part.theirs}, where its configuration says "
                            f"{list(part.their_shape)}"
                        )
                first = parts[0]
                shape = first.shape if first.expert is None else (blocks.num_experts, *first.shape)
                dtype = torch.float32 if first.fp32 else tensors[prefix + first.theirs].dtype
                filled = torch.empty(shape, dtype=dtype)
                below = {part.theirs: tensors[prefix + part.theirs] for part in parts}
                fill(filled, (0,) * len(shape), parts, below.__getitem__)
                renamed[f"{ROOT}{prefix}{ours}"] = filled
            for part in family.parts(blocks):
                tensors.pop(prefix + part.theirs, None)
        return renamed | {ROOT + name: tensor for name, tensor in tensors.items()}

    return rename
