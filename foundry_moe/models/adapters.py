"""LoRA adapters of a model: started from a PEFT folder, and switched off, alone or with peft's.

A PEFT folder holds peft's tensors of fused experts, or a pair for each expert's matrix.

Shapes: E experts, K inputs and N outputs of a matrix, M rank of the folder, L rank of the run.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from foundry_moe.checkpoint.strict import shown
from foundry_moe.config import LoRAConfig
from foundry_moe.layers.experts import Experts
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.pretrained import local_box
from foundry_moe.schema import UserError

_OTHER_ADAPTERS = ("alpha_pattern", "rank_pattern", "use_dora", "lora_bias")  # keys of a PEFT folder
_MATRICES = {"gate_proj": "w1", "up_proj": "v1", "down_proj": "w2", "w1": "w1", "w3": "v1", "w2": "w2"}
_PAIR = re.compile(r"\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight$")
_FUSED = re.compile(r"\.layers\.(\d+)\..*\.experts\.(base_layer\.)?lora_([AB])\.weight$")

# (layer, matrix, "A" or "B") -> A [E, K, M] or B [E, N, M]
Factors = dict[tuple[int, str, str], Tensor]


def _experts_with_adapters(model: nn.Module) -> list[Experts]:
    found = [layer.experts for layer in moe_layers(model)]
    return [experts for experts in found if isinstance(experts, Experts) and experts.lora is not None]


class _WithPeft:
    """Whether peft's adapters of a model are enabled, as its first layer with one says; true without such a layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.layer = model, _peft_layer(model)

    def __call__(self, *, search: bool) -> bool:
        if self.layer is None and search and not torch.compiler.is_compiling():
            self.layer = _peft_layer(self.model)
        return self.layer is None or not self.layer.disable_adapters


def _peft_layer(model: nn.Module) -> Any:
    peft = sys.modules.get("peft.tuners.tuners_utils")  # a model with peft's layers has imported it
    return peft and next((module for module in model.modules() if isinstance(module, peft.BaseTunerLayer)), None)


def follow_peft(model: nn.Module) -> None:
    """Makes peft's `disable_adapter()` disable the adapters of experts, too."""
    switch = _WithPeft(model)
    for number, experts in enumerate(_experts_with_adapters(model)):
        # the first of a pass searches for peft's layers, which may be added later: that walks through the model
        experts.adapters_enabled = partial(switch, search=number == 0)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within this context experts compute without their LoRA adapters, as the frozen model that the run began with.

    Raises:
        ValueError: the model has no such adapters; or peft's adapters too, which would stay on.
    """
    layer, found = _peft_layer(model), _experts_with_adapters(model)
    if not found:
        raise UserError("adapters_off: the model has no experts with lora")
    if layer is not None and not layer.disable_adapters:
        raise UserError(
            "adapters_off: the model has adapters of peft, which would stay on; use peft's model.disable_adapter(), "
            "which switches those of experts too"
        )
    before = [experts.adapters_enabled for experts in found]
    for experts in found:
        experts.adapters_enabled = lambda: False
    try:
        yield
    finally:
        for experts, enabled in zip(found, before, strict=True):
            experts.adapters_enabled = enabled


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Fills the adapters of a model's experts, placed on a mesh or not, as `foundry-moe export --adapter` wrote them.

    The folder's scale may differ from the run's: B takes the quotient.

    Raises:
        ValueError: no such folder, or adapters of another model, rank or target than the run's.
    """
    folder = Path(folder)
    tensors, config = read_folder(folder)
    layers = {layer.layer_index: layer for layer in moe_layers(model)}
    scale = scale_of(config)
    counts = {layer.num_experts for layer in layers.values()}
    factors = factors_of(tensors, config, max(counts, default=1), folder)
    for index, layer in layers.items():
        experts = layer.experts
        if not isinstance(experts, Experts) or experts.lora is None:
            continue
        for matrix, names in experts.adapter_names.items():
            pair = [factors.pop((index, matrix, factor), None) for factor in "AB"]
            if pair[0] is None or pair[1] is None:
                raise UserError(f"lora.start: {folder} has no adapter of {matrix} in layer {index}")
            a_EKM, b_ENM = _of_rank(pair[0], pair[1], matrix, experts.lora.r, folder)
            for name, whole in zip(names, (a_EKM, b_ENM * (scale / experts.lora.scale)), strict=True):
                parameter = experts.get_parameter(name)
                if tuple(parameter.shape) != tuple(whole.shape):
                    raise UserError(
                        f"lora.start: {folder} has shape {list(whole.shape)} for {name} of layer {index}, the run has "
                        f"{list(parameter.shape)}"
                    )
                local, begin = local_box(parameter)
                for dim, first in enumerate(begin):
                    whole = whole.narrow(dim, first, local.shape[dim])
                local.copy_(whole)
    left = sorted(key for key, factor in factors.items() if key[2] == "B" and factor.any())
    if left:
        raise UserError(
            f"lora.start: {folder} adapts {left[0][1]} of layer {left[0][0]}, which the run does not: add it to "
            "lora.targets"
        )


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the configuration of a PEFT folder."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        scale_of(config)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"lora.start ({folder}) cannot be read as a PEFT folder: {error!r}") from None
    strange = [key for key in _OTHER_ADAPTERS if config.get(key)]
    strange += ["peft_type"] * (config.get("peft_type", "LORA") != "LORA")
    strange += ["use_rslora"] * (config.get("use_rslora") not in (None, True, False))
    if strange:
        raise UserError(
            f"lora.start: {strange[0]} ({shown(config[strange[0]])}) of {folder}: only LoRA of one rank and scale is "
            "read; merge these adapters into their model with peft's merge_and_unload"
        )
    infinite = next((name for name, tensor in tensors.items() if not tensor.float().isfinite().all()), None)
    if infinite is not None:
        raise UserError(f"lora.start: {infinite} of {folder} holds infinite or undefined numbers")
    return tensors, config


def scale_of(config: Mapping[str, Any]) -> float:
    """The scale of the products B A, from the configuration of a PEFT folder."""
    lora = LoRAConfig(r=int(config["r"]), alpha=float(config["lora_alpha"]), rslora=bool(config.get("use_rslora")))
    return lora.scale


def factors_of(tensors: dict[str, Tensor], config: Mapping[str, Any], experts: int, folder: Path) -> Factors:
    """Reads factors of all formats. A tensor that belongs to no expert is an error: the run would not train it."""
    rank = int(config["r"])
    # before 0.19 peft took all fused weights for [E, K, N]: its A had the outputs of [E, N, K], its B the inputs
    written_by = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))
    exchanged = written_by is not None and (int(written_by[1]), int(written_by[2])) < (0, 19)
    pairs: dict[tuple[int, str, str], dict[int, Tensor]] = defaultdict(dict)
    factors: Factors = {}
    for name, tensor in tensors.items():
        pair, fused = _PAIR.search(name), _FUSED.search(name)
        if pair and pair[3] in _MATRICES:
            if tensor.dim() != 2 or tensor.shape[0 if pair[4] == "A" else 1] != rank:
                raise UserError(f"lora.start: {name} {list(tensor.shape)} of {folder} is not of its rank, r ({rank})")
            pairs[int(pair[1]), _MATRICES[pair[3]], pair[4]][int(pair[2])] = tensor.mT if pair[4] == "A" else tensor
            continue
        if fused is None or tensor.dim() != 2:
            raise UserError(f"lora.start: {name} of {folder} is not an adapter of experts")
        layer, wide, factor = int(fused[1]), fused[2] is not None, fused[3]
        if tensor.shape[0 if factor == "A" else 1] != rank * experts:
            raise UserError(f"lora.start: {name} {list(tensor.shape)} of {folder} is not of {experts} experts")
        # A: expert e in rows e * M and on; B: in columns e, e + E, ...
        by_expert = tensor.view(experts, rank, -1) if factor == "A" else tensor.view(-1, rank, experts)
        whole = by_expert.mT if factor == "A" else by_expert.permute(2, 0, 1)
        if exchanged:
            factor = "B" if factor == "A" else "A"
        matrices = ("w1", "v1") if wide else ("w2",)
        # gate and up share an A; in B gate is above up
        halves = (whole,) * len(matrices) if factor == "A" else whole.chunk(len(matrices), dim=1)
        factors |= {(layer, matrix, factor): half for matrix, half in zip(matrices, halves, strict=True)}
    for key, found in pairs.items():
        if sorted(found) != list(range(experts)):
            raise UserError(f"lora.start: {folder} has adapters of {len(found)} of {experts} experts in layer {key[0]}")
        factors[key] = torch.stack([found[e] for e in range(experts)])
    return factors


def _of_rank(a_EKM: Tensor, b_ENM: Tensor, matrix: str, rank: int, folder: Path) -> tuple[Tensor, Tensor]:
    """The factors without the zero columns that an export adds, where gate and up share one rank of twice the size."""
    found = a_EKM.shape[2]
    if found == rank:
        return a_EKM, b_ENM
    own = slice(rank, 2 * rank) if matrix == "v1" else slice(0, rank)
    rest = slice(0, rank) if matrix == "v1" else slice(rank, 2 * rank)
    if found != 2 * rank or b_ENM[..., rest].any():
        raise UserError(f"lora.r ({rank}) must be {found}, the rank of lora.start ({folder})")
    return a_EKM[..., own], b_ENM[..., own]
