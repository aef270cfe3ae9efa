"""Targets of a load into the state dict of a training run on any mesh. Each rank's needs follow from the layouts.

Sections `model` and `optim` must match the checkpoint; other sections may lack or add tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foundry_moe.checkpoint.codec import DTYPE_NAMES, DTYPES, decode, inline_tensors
from foundry_moe.checkpoint.errors import MismatchError
from foundry_moe.checkpoint.exchange import Targets
from foundry_moe.checkpoint.layout import narrow_to
from foundry_moe.checkpoint.manifest import Manifest, tensors_in
from foundry_moe.checkpoint.snapshot import flatten, local_part

STRICT = ("model", "optim")  # sections whose tensors must match exactly
NAMES_SHOWN = 5


class StateTargets(Targets):
    """Fills the tensors of a state dict in place; `result` is the whole state as it was saved, with these tensors."""

    def __init__(
        self, manifest: Manifest, state_dict: Mapping[str, Any], *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Raises MismatchError if the checkpoint belongs to another model, DamagedError if values cannot be read."""
        self.manifest, self.rank = manifest, rank
        flat = flatten(state_dict, world_size, inline=False)
        self.tensors, self.layouts = dict(flat.tensors), dict(flat.layouts)
        inline = inline_tensors(self.manifest.values)
        saved = {name: (entry.shape, entry.dtype) for name, entry in self.manifest.tensors.items()}
        saved |= {name: (tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]) for name, tensor in inline.items()}
        self._check(saved)
        for name, entry in self.manifest.tensors.items():
            # a tensor of another section that this state lacks or has otherwise: read in full on every rank
            if name not in self.tensors or self._described(name) != saved[name]:
                tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
                fresh = flatten({name: tensor}, world_size, inline=False)
                self.tensors[name], self.layouts[name] = tensor, fresh.layouts[name]
        for name, tensor in inline.items():
            if name in self.tensors and self._described(name) == saved[name]:
                self._fill(name, tensor)
            else:
                self.tensors.pop(name, None)  # of another section: returned as it was saved
        places = {
            name: [(box, local_part(self.tensors[name])) for box in layout.boxes_of(rank)]
            for name, layout in self.layouts.items()
            if name in manifest.tensors
        }
        super().__init__(manifest, rank, self.layouts, places)
        values = copy.deepcopy(manifest.values)
        for path, tag, node in tensors_in(values):
            if tag == "$tensor" and path in self.tensors:  # a target with the same value
                del node["$tensor"]
                node["$ref"] = path
        self.result: dict[str, Any] = decode(values, tensor=self.tensors.__getitem__)

    def _described(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a tensor of this state."""
        return tuple(self.layouts[name].shape), DTYPE_NAMES.get(self.tensors[name].dtype, "?")

    def _check(self, saved: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        problems = []
        for name in sorted(self.tensors.keys() | saved.keys()):
            if name.split(".")[0] not in STRICT:
                continue
            if name not in saved:
                problems.append(f"{name} is not in the checkpoint")
            elif name not in self.tensors:
                problems.append(f"{name} {list(saved[name][0])} is not in this model")
            else:
                here = self._described(name)
                if here != saved[name]:
                    problems.append(
                        f"{name} is {here[1]} {list(here[0])} here and {saved[name][1]} {list(saved[name][0])} there"
                    )
        if problems:
            more = f"; and {len(problems) - NAMES_SHOWN} more" if len(problems) > NAMES_SHOWN else ""
            raise MismatchError(
                f"the checkpoint of step {self.manifest.info.get('step')} belongs to another model: "
                f"{'; '.join(problems[:NAMES_SHOWN])}{more}. Nothing was loaded: give this run another folder, or the "
                "model that the checkpoint was written with"
            )

    def _fill(self, name: str, value: Tensor) -> None:
        for box in self.layouts[name].boxes_of(self.rank):
            local_part(self.tensors[name]).copy_(narrow_to(value, (0,) * value.ndim, box))
