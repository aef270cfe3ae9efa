"""Reads a folder of safetensors into a model that is sharded already: each rank its own slices, a tensor at a time.

Nobody holds the model: a rank reads what its shares of tensors are made of, and closes the file before the next tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from foundry_moe.checkpoint.safetensors_files import safetensors_in
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.models.families import Part
from foundry_moe.models.families.family import whole
from foundry_moe.models.filling import by_tensor, fill

_FLOATS = ("F64", "F32", "F16", "BF16")
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")
# buffers that old versions saved
_IGNORED = (r"rotary_emb\.inv_freq$", r"masked_bias$", r"attn\.bias$", r"attention\.bias$")


class SafetensorsFolder:
    """The tensors of a Hugging Face model on disk, by name.

    Raises:
        ValueError: no such folder, no safetensors in it, a file that is missing, truncated or no safetensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is no folder with a Hugging Face model")
        paths = safetensors_in(self.folder)
        if not paths:
            pickles = "; its .bin files can be converted with save_pretrained" * any(self.folder.glob("*.bin"))
            raise ValueError(f"{self.folder} holds no safetensors files{pickles}")
        for path in paths:
            for name in self._opened(path).keys():  # noqa: SIM118 - no mapping
                self.files[name] = path
        self.close()

    def _opened(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != path:
            self.close()
            try:
                self._open = (path, safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
        return self._open[1]

    def close(self) -> None:
        """Lets go of the open file and of its pages in memory."""
        self._open = None

    def part(self, name: str) -> Any:
        """A tensor whose slices are read as they are asked for."""
        return self._opened(self.files[name]).get_slice(name)

    def check(self, name: str, shape: Iterable[int]) -> None:
        """Raises ValueError where a tensor is not there, has another shape, or is not of floats that we read."""
        if name not in self.files:
            raise ValueError(f"{self.folder} has no tensor {name}: it is not a checkpoint of this model")
        part = self.part(name)
        if tuple(part.get_shape()) != tuple(shape):
            raise ValueError(f"{name}: {self.folder} has shape {list(part.get_shape())}, the model has {list(shape)}")
        if part.get_dtype() not in _FLOATS:
            raise ValueError(f"{name}: {self.folder} has dtype {part.get_dtype()}, not one of {', '.join(_FLOATS)}")


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's share of a tensor, and where it begins; of an ordinary tensor all of it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(begin)


@torch.no_grad()
def read_pretrained(model: nn.Module, folder: SafetensorsFolder, *, root: str = "") -> None:
    """Fills all parameters and saved buffers of a converted model, those of this rank.

    Args:
        model: with MoE layers from `apply_dmoe`, on real memory, sharded or not.
        root: name of the Hugging Face model in it.

    Raises:
        ValueError: a tensor is missing, of another shape or dtype, or one too many.
    """
    wanted = dict(_wanted(model, root))
    for _, sources in wanted.values():
        for part in sources:
            folder.check(part.theirs, part.their_shape)
    _refuse_extra(model, folder, {part.theirs for _, parts in wanted.values() for part in parts}, root)
    for tensor, sources in wanted.values():
        local, begin = local_box(tensor)
        fill(local, begin, sources, folder.part)
        folder.close()


def _wanted(model: nn.Module, root: str) -> Iterator[tuple[str, tuple[Tensor, list[Part]]]]:
    """Tensors of the model, and the parts of the folder that they are made of, names of theirs in full."""
    prefix = f"{root}." if root else ""
    layers = named_moe_layers(model)
    saved = model.state_dict().keys()
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, layer in layers.items():
        block = _WRAPPERS.sub("", name).removeprefix(prefix)
        for ours, parts in by_tensor(layer.sources).items():
            full = [replace(part, theirs=f"{block}.{part.theirs}") for part in parts]
            yield f"{name}.{ours}", (tensors[f"{name}.{ours}"], full)
    inside = tuple(f"{name}." for name in layers)
    plain = {_WRAPPERS.sub("", name) for name in saved}
    for name, tensor in tensors.items():
        clean = _WRAPPERS.sub("", name)
        if clean not in plain or (inside and name.startswith(inside)) or not clean.startswith(prefix):
            continue
        yield name, (tensor, [whole(name, clean.removeprefix(prefix), *tensor.shape)])


def _refuse_extra(model: nn.Module, folder: SafetensorsFolder, wanted: set[str], root: str) -> None:
    module = model.get_submodule(root)
    tied = {_WRAPPERS.sub("", name) for name, _ in module.named_parameters(remove_duplicate=False)}
    drawn = [
        re.escape(_WRAPPERS.sub("", name)) for name, layer in named_moe_layers(module).items() if not layer.sources
    ]
    ignored = [*_IGNORED, *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    ignored += [f"^{name}\\." for name in drawn]  # dense blocks whose experts a user wants random
    for name in sorted(set(folder.files) - wanted - tied):
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(f"{folder.folder} has a tensor {name}, which this {type(module).__name__} does not have")


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Gives memory to everything that is on the meta device, without values; parameters that are shared stay shared."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            module.to_empty(device=device, recurse=False)
