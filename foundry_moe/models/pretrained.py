"""Fills dMoE layers with Hugging Face tensors: a module's, or those of a folder of safetensors.

A sharded model is filled one tensor at a time: each rank reads the slices of its own shard and closes the file before
the next tensor, so no rank holds the whole model.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from foundry_moe.checkpoint.errors import DamagedError
from foundry_moe.checkpoint.strict import mapping, parse_json, shown
from foundry_moe.config import MOST_EXPERTS
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.models.blocks import WeightPart, whole
from foundry_moe.models.configurations import HEADS, WIDTH, check_configuration, first_of
from foundry_moe.models.families import FAMILIES
from foundry_moe.schema import UserError, plain_name

log = logging.getLogger(__name__)

_ROOT = "model."  # where LLM Foundry's wrapper holds the Hugging Face model
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_POINTER = b"version https://git-lfs"
_FLOATS = ("F64", "F32", "F16", "BF16")
# buffers that old versions of transformers saved
_IGNORED = (r"rotary_emb\.inv_freq$", r"masked_bias$", r"attn\.bias$", r"attention\.bias$")


@torch.no_grad()
def fill(local: Tensor, begin: tuple[int, ...], parts: Iterable[WeightPart], theirs: Callable[[str], Any]) -> None:
    """Fills a tensor of ours from parts of theirs, and reads only the slices that it needs.

    Args:
        local: a whole tensor or a box of it, without autograd.
        begin: index of the box in the whole tensor.
        parts: the parts of this tensor, in any order.
        theirs: from a name in a `WeightPart` to a tensor, or to a slice of a safetensors file.
    """
    for part in parts:
        target, offset = local, begin
        if part.expert is not None:
            if not begin[0] <= part.expert < begin[0] + local.shape[0]:
                continue
            target, offset = local[part.expert - begin[0]], begin[1:]
        if target.numel() == 0:
            continue
        sizes = tuple(target.shape)
        found = theirs(part.theirs)[part.box(offset, sizes)]
        found = found.reshape(sizes[::-1]).t() if part.transposed else found.reshape(sizes)
        target.copy_(found)
        if part.scale != 1:
            target.mul_(part.scale)


def by_tensor(parts: Iterable[WeightPart]) -> dict[str, list[WeightPart]]:
    """Groups parts by the name of our tensor."""
    found: dict[str, list[WeightPart]] = {}
    for part in parts:
        found.setdefault(part.ours, []).append(part)
    return found


class SafetensorsFolder:
    """The tensors of a Hugging Face model on disk, by name."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is not a folder with a Hugging Face model")
        paths = safetensors_in(self.folder)
        if not paths:
            pickles = "; its .bin files can be converted with save_pretrained" * any(self.folder.glob("*.bin"))
            raise UserError(f"{self.folder} holds no safetensors files{pickles}")
        for path in paths:
            for name in self._opened(path).keys():  # noqa: SIM118 - no mapping
                if name in self.files:
                    raise UserError(f"{path} and {self.files[name].name} both hold {name}: delete one of the files")
                self.files[name] = path
        self.close()

    def _opened(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != path:
            self.close()
            try:
                self._open = (path, safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read as safetensors: {error}") from None
        return self._open[1]

    def close(self) -> None:
        """Closes the open file and releases its pages."""
        self._open = None

    def part(self, name: str) -> Any:
        """A safetensors slice: indexing it reads from the file."""
        return self._opened(self.files[name]).get_slice(name)

    def check_name(self, name: str) -> None:
        """Raises ValueError if a tensor is missing."""
        if name not in self.files:
            raise UserError(f"{self.folder} has no tensor {name}: it is not a whole checkpoint of this model")

    def check(self, name: str, shape: Iterable[int]) -> None:
        """Raises ValueError if a tensor is missing or has another shape or a dtype that is not read."""
        self.check_name(name)
        part = self.part(name)
        if tuple(part.get_shape()) != tuple(shape):
            raise UserError(f"{name}: {self.folder} has shape {list(part.get_shape())}, the model has {list(shape)}")
        if part.get_dtype() not in _FLOATS:
            raise UserError(f"{name}: {self.folder} has dtype {part.get_dtype()}, not one of {', '.join(_FLOATS)}")


def local_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's shard of a tensor and the index where it begins; the whole of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), tuple(begin)


@torch.no_grad()
def read_pretrained(model: nn.Module, folder: SafetensorsFolder, *, root: str = "") -> None:
    """Fills this rank's parameters and saved buffers of a converted model.

    Args:
        model: has MoE layers from `apply_dmoe` and real memory, sharded or not.
        root: name of the Hugging Face model inside `model`.
    """
    wanted = _wanted(model, root)
    parts = [part for _, sources in wanted for part in sources]
    for part in parts:
        folder.check(part.theirs, part.their_shape)
    _refuse_extra(model, folder, {part.theirs for part in parts}, root)
    for tensor, sources in wanted:
        local, begin = local_box(tensor)
        fill(local, begin, sources, folder.part)
        folder.close()


def check_names(model: nn.Module, folder: SafetensorsFolder, *, root: str = "") -> None:
    """Raises ValueError if a tensor of a converted model is not in the folder that transformers has loaded it from."""
    module = model.get_submodule(root)
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    optional = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    for _, sources in _wanted(model, root):
        for name in (part.theirs for part in sources):
            if name.removeprefix(prefix) not in folder.files and not any(re.search(key, name) for key in optional):
                folder.check_name(name)


def _wanted(model: nn.Module, root: str) -> list[tuple[Tensor, list[WeightPart]]]:
    """Each tensor of the model with its parts in the folder, under full names."""
    prefix = f"{root}." if root else ""
    layers, found = named_moe_layers(model), []
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, layer in layers.items():
        block = plain_name(name).removeprefix(prefix)
        for ours, parts in by_tensor(layer.sources).items():
            full = [replace(part, theirs=f"{block}.{part.theirs}") for part in parts]
            found.append((tensors[f"{name}.{ours}"], full))
    inside = tuple(f"{name}." for name in layers)
    saved = {plain_name(name) for name in model.state_dict()}
    for name, tensor in tensors.items():
        clean = plain_name(name)
        if clean in saved and clean.startswith(prefix) and not name.startswith(inside):
            found.append((tensor, [whole(name, clean.removeprefix(prefix), *tensor.shape)]))
    return found


def _refuse_extra(model: nn.Module, folder: SafetensorsFolder, wanted: set[str], root: str) -> None:
    module = model.get_submodule(root)
    tied = {plain_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    drawn = [re.escape(plain_name(name)) for name, layer in named_moe_layers(module).items() if not layer.sources]
    ignored = [*_IGNORED, *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    ignored += [f"^{name}\\." for name in drawn]  # dense blocks whose experts are random
    for name in sorted(set(folder.files) - wanted - tied):
        if not any(re.search(pattern, name) for pattern in ignored):
            raise UserError(f"{folder.folder} has a tensor {name}, which this {type(module).__name__} does not have")


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocates uninitialized memory for all tensors on the meta device; tied parameters stay tied."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            module.to_empty(device=device, recurse=False)


def renaming_of(folder: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """A function that gives the tensors of a Hugging Face folder the names and layouts of a run of `hf_causal_lm`.

    None if the folder holds no model of a family of ours.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = mapping(parse_json(path.read_bytes(), str(path)), str(path))
    except DamagedError as error:
        raise UserError(str(error)) from None
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        log.warning(
            "%s: model_type %s is no MoE family that is taken over (%s): the tensors keep their names",
            path,
            shown(model_type),
            ", ".join(sorted(FAMILIES)),
        )
        return None
    check_configuration(config, str(path))
    from transformers import AutoConfig

    family = FAMILIES[model_type]
    try:
        made = AutoConfig.from_pretrained(folder)
        blocks = family.read(made)
    except Exception as error:  # transformers raises many types for an invalid configuration
        raise UserError(f"{path} is no configuration of {model_type}: {str(error).partition(chr(10))[0]}") from error
    if not blocks.layers:
        raise UserError(f"{path}: no layer of this model has experts")
    if not 1 <= blocks.top_k <= blocks.num_experts <= MOST_EXPERTS:
        raise UserError(
            f"{path}: {blocks.top_k} of {blocks.num_experts} experts for a token: there must be 1 to "
            f"{blocks.num_experts}, of at most {MOST_EXPERTS} experts"
        )

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Removes tensors from its argument layer by layer, so that only one layer is in memory twice."""
        renamed = {}
        _check_attention(config, tensors, path)
        parts = family.parts(blocks)
        shapes = {part.theirs: part.their_shape for part in parts}
        for layer in blocks.layers:
            prefix = family.block_name(layer) + "."
            theirs: dict[str, Tensor] = {}
            for name, shape in shapes.items():
                found = tensors.pop(prefix + name, None)
                if found is None or tuple(found.shape) != shape:
                    has = "no tensor" if found is None else f"shape {list(found.shape)} for"
                    raise UserError(f"{folder} has {has} {prefix}{name}, where its configuration has {list(shape)}")
                theirs[name] = found
            for ours, its_parts in by_tensor(parts).items():
                first = its_parts[0]
                shape = first.shape if first.expert is None else (blocks.num_experts, *first.shape)
                filled = torch.empty(shape, dtype=torch.float32 if first.fp32 else theirs[first.theirs].dtype)
                fill(filled, (0,) * len(shape), its_parts, theirs.__getitem__)
                renamed[f"{_ROOT}{prefix}{ours}"] = filled
        embedding = next((name for name in tensors if name.endswith(EMBEDDINGS)), None)
        if made.tie_word_embeddings and embedding is not None:
            tensors.setdefault(HEAD, tensors[embedding])  # files hold it once, a run's state dict under both names
        return renamed | {_ROOT + name: tensor for name, tensor in tensors.items()}

    return rename


def _check_attention(config: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> None:
    """Raises ValueError if the shapes of the attention's projections do not match the number of heads."""
    heads, width = first_of(config, HEADS), first_of(config, WIDTH)
    for kind, count in (("q_proj", heads), ("k_proj", config.get("num_key_value_heads") or heads)):
        name = f"model.layers.0.self_attn.{kind}.weight"
        if heads is None or width is None or name not in tensors:
            continue
        rows = count * (config.get("head_dim") or width // heads)
        if tensors[name].shape[0] != rows:
            raise UserError(
                f"{path}: {count} heads would make {rows} rows of {name}, which has {tensors[name].shape[0]}"
            )


def safetensors_in(folder: Path) -> list[Path]:
    """The safetensors files of a folder's model; none where it has no such files.

    As transformers does: `model.safetensors` alone, else those that the index names. Without both, all files.

    Raises:
        ValueError: the index cannot be read, or names something else than safetensors files beside it; a file is a
            symbolic link out of the folder or a pointer of Git LFS.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _inside(folder, [single])
    if not index.is_file():
        return _inside(folder, sorted(folder.glob("*.safetensors")))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} cannot be read as an index of safetensors: {error!r}") from None
    strange = strange or [name for name in names if not (folder / name).is_file()]
    if strange or not names:
        raise UserError(f"{index} names {shown(strange)}, not safetensors files beside it")
    return _inside(folder, [folder / name for name in names])


def _inside(folder: Path, files: list[Path]) -> list[Path]:
    """The files, if each lies in the folder; links to `blobs` are followed where the hub's cache has made them."""
    real = folder.resolve()
    allowed = [real, *([real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [])]
    for file in files:
        if file.resolve().parent not in allowed:
            raise UserError(f"{file} is a symbolic link out of the folder: copy the file there")
        with file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise UserError(f"{file} is a pointer of Git LFS, not the weights: run `git lfs pull` in its folder")
    return files
