"""LoRA adapters of a checkpoint: added to the frozen weights, or as a PEFT folder of their own.

Shapes: E experts, K inputs and N outputs of a matrix, L rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe.checkpoint.codec import DTYPES, inline_tensors
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.commands.exported_files import Source, Weights
from foundry_moe.commands.source_files import copy_tokenizer
from foundry_moe.launch.run_files import local_json
from foundry_moe.models.adapters import Factors, factors_of, read_folder, scale_of
from foundry_moe.models.blocks import Blocks, WeightPart
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.models.families import Family, family_of
from foundry_moe.models.frozen_weights import digest
from foundry_moe.models.native.architecture import Architecture
from foundry_moe.models.native.state_dict import native_of
from foundry_moe.schema import UserError, shorten

_FACTOR = re.compile(r"(.*?\.(\d+)\..*\.experts\.)(w1|v1|w2)_([AB])_E([DF])L")
_STATE = "optim.state."
_FUSED = "base_model.model.model.layers.{layer}.mlp.experts."  # transformers 5's name in all families with such experts
FUSED_TARGETS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
_LAYOUT_SINCE = "0.19.0"  # of peft: earlier ones exchange A and B of fused weights, and refuse the shapes written here
# from all factors and the layers to the tensors of a folder, by name
Pairs = Callable[[Factors, list[int]], Iterator[tuple[str, Tensor]]]


def _scale_of(architecture: Architecture) -> float:
    lora = architecture.experts.lora_config
    if lora is None:
        raise UserError("--merge and --adapter are for runs with lora, and this checkpoint has no adapters")
    return lora.scale


def frozen_sources(
    base: Any, architecture: Architecture, sources: Mapping[str, Source], place: str | None
) -> dict[str, Source]:
    """The weights that a checkpoint leaves out, as the run had them, from the Hugging Face model it began with.

    Args:
        base: the checkpoint's record of them.
        place: a folder or name; None = the recorded one.
    """
    recorded = base if isinstance(base, Mapping) else {}
    where = place or str(recorded.get("from") or "")
    hint = "name the Hugging Face model that the run began with by --base FOLDER, or use --adapter"
    if not where or architecture.model_type == "mpt":
        raise UserError(f"the checkpoint leaves out the frozen weights and records no place of theirs: {hint}")
    try:
        model = AutoModelForCausalLM.from_pretrained(where, torch_dtype="auto", trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the checkpoint leaves out the frozen weights, and {where} cannot be read ({reason}): {hint}"
        ) from error
    apply_dmoe(model, replace(architecture.experts, layers=architecture.layers, lora=None, backend="auto"), loaded=True)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters() if name not in sources}
    found = {tensor.dtype for tensor in tensors.values()}
    for dtype in (None, *sorted({torch.float32, torch.bfloat16, torch.float16} - found, key=str)):
        cast = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in tensors.items()}
        named = {f"{architecture.prefix}{name}": tensor for name, tensor in cast.items()}
        if digest(named) == recorded.get("digest"):
            return {name: Source.of(tensor) for name, tensor in cast.items()}
    raise UserError(
        f"{where} does not hold the {recorded.get('tensors')} frozen tensors that the checkpoint leaves out (digest "
        f"{recorded.get('digest')}): {hint}"
    )


def merge(architecture: Architecture, weights: Weights, dtype: str | None) -> Weights:
    """The weights with their adapters, added when they are read; `dtype`: of the sums, which are rounded once."""
    scale = _scale_of(architecture)
    factors = {name: match for name in weights.sources if (match := _FACTOR.fullmatch(name))}
    tensors = weights.read(factors)
    kept = {name: source for name, source in weights.sources.items() if name not in factors}
    for name, match in factors.items():
        prefix, _, matrix, factor, inputs = match.groups()
        if factor == "A":
            outputs = "D" if inputs == "F" else "F"
            weight = f"{prefix}{matrix}_E{outputs}{inputs}"
            added = partial(_product, tensors[name], tensors[f"{prefix}{matrix}_B_E{outputs}L"], scale)
            kept[weight] = replace(kept[weight], added=added, dtype=dtype or kept[weight].dtype)
    return replace(weights, sources=kept)


def _product(a_EKL: Tensor, b_ENL: Tensor, scale: float) -> Tensor:
    """scale * B A, [E, N, K] in fp64."""
    return scale * (b_ENL.double() @ a_EKL.double().mT)


def write_adapter(
    architecture: Architecture, weights: Weights, out: Path, *, base: str | None, form: str, dtype: str | None
) -> str:
    """Writes `adapter_config.json` and `adapter_model.safetensors`; returns a sentence about them.

    Args:
        base: name or folder of the model that is adapted; None = the recorded one.
        form: peft | per-expert.
        dtype: of the tensors, as torch names it; None = fp32.
    """
    scale = _scale_of(architecture)
    if others := _trained_beside(weights.found):
        raise UserError(
            f"--adapter: the run also trained {shorten(others)}, which a folder of adapters leaves out: use --merge, "
            "or train adapters alone (optimizer.disable_grad: '^(?!.*_[AB]_E[DF]L$)')"
        )
    native = native_of(replace(architecture, experts=replace(architecture.experts, lora=None)))
    parts = _parts(native.family, native.blocks)
    base = base or architecture.source
    _check_base(architecture, native.family, base)
    names = {name: match for name in weights.sources if (match := _FACTOR.fullmatch(name))}
    tensors = weights.read(names)
    factors = {(int(match[2]), match[3], match[4]): tensors[name] for name, match in names.items()}
    rank = next(iter(tensors.values())).shape[2]
    shapes = {part.ours.removeprefix("experts.")[:2]: part.shape for part in parts}
    for layer in native.blocks.layers:  # servers expect all matrices: those without an adapter get zeros
        for matrix, (outputs, inputs) in shapes.items():
            for factor, rows in (("A", inputs), ("B", outputs)):
                factors.setdefault((layer, matrix, factor), torch.zeros(native.blocks.num_experts, rows, rank))
    pairs = None if form == "peft" else partial(_per_expert, native.family, parts)
    _write(factors, out, scale, dtype, base=base, pairs=pairs)
    layers = len(native.blocks.layers)
    return (
        f"step {weights.found.commit.step}, adapters of {layers} layers of {native.family.name} in the format {form}, "
        f"for {base or 'a model that the checkpoint does not name: name it with --base'}"
    )


def _parts(family: Family, blocks: Blocks) -> list[WeightPart]:
    """The matrices of one block's experts. Raises ValueError if the family joins those of several experts."""
    parts = [part for part in family.parts(blocks) if part.expert is not None]
    if any(part.their_shape != part.shape or part.transposed for part in parts):
        raise UserError(f"--adapter: {family.name} has no matrix of its own for each expert; use --merge")
    return parts


def _check_base(architecture: Architecture, family: Family, base: str) -> None:
    """Raises ValueError if `base` is not the model that the adapters are for, as far as this machine has it."""
    config = local_json(base or None, "config.json")
    if architecture.model_type != family.model_type and config.get("model_type") != family.model_type:
        raise UserError(
            "--adapter: the run's base is its upcycled model, which no folder holds: use --merge, or --base FOLDER "
            f"with that model as {family.name}"
        )
    rows, words = architecture.config.get("vocab_size"), config.get("vocab_size")
    if words not in (None, rows):
        raise UserError(
            f"--adapter: the run's model has {rows} tokens, {base} has {words}: use --merge, or --base FOLDER with a "
            f"model of {rows}"
        )


def _trained_beside(found: Found) -> list[str]:
    """Parameters with an optimizer state that are no adapters. SGD without momentum has no states."""
    states = [*found.manifest.tensors, *inline_tensors(found.manifest.values)]
    trained = {name.removeprefix(_STATE).rpartition(".")[0] for name in states if name.startswith(_STATE)}
    return sorted(name for name in trained if not _FACTOR.search(name))


def convert_adapter(folder: Path, out: Path, base: str | None, form: str, dtype: str | None) -> str:
    """Writes a PEFT folder's adapters in another format; returns a sentence about them.

    Args:
        base: the folder of the model that is adapted, for its `config.json` and its tokenizer, if `folder` has none.
    """
    try:
        config = json.loads((Path(base or "") / "config.json").read_text())
        kind = str(config["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--base ({base}) must be the folder of the model that {folder} adapts, with its config.json: {error!r}"
        ) from error
    family = family_of(kind)
    blocks = family.read(AutoConfig.for_model(**config))
    parts = _parts(family, blocks)
    tensors, settings = read_folder(folder)
    factors = factors_of(tensors, settings, blocks.num_experts, folder)
    layers = sorted({layer for layer, _, _ in factors})
    for layer, matrix, factor in product(layers, ("w1", "v1", "w2"), "AB"):
        if (layer, matrix, factor) not in factors:
            raise UserError(f"{folder} has no lora_{factor} of {matrix} in layer {layer}")
    pairs = None if form == "peft" else partial(_per_expert, family, parts)
    _write(factors, out, scale_of(settings), dtype, base=base, pairs=pairs)
    copy_tokenizer(folder if (folder / "tokenizer_config.json").is_file() else Path(base or ""), out)
    return f"adapters of {len(layers)} layers of {kind} in the format {form}"


def _write(
    factors: Factors, out: Path, scale: float, dtype: str | None, *, base: str | None, pairs: Pairs | None
) -> None:
    """Writes the folder: the tensors of `pairs`, or peft's fused ones. A local `base` is recorded as absolute path."""
    layers = sorted({layer for layer, _, _ in factors})
    experts, _, rank = next(iter(factors.values())).shape
    written = dict((pairs or _fused)(factors, layers))
    if pairs is None:
        rank = next(tensor.shape[0] for name, tensor in written.items() if ".lora_A." in name) // experts
        targets = FUSED_TARGETS
    else:
        targets = {"target_modules": sorted({name.split(".")[-3] for name in written})}
    kind = DTYPES[dtype] if dtype else torch.float32
    save_file(
        {name: tensor.to(kind, copy=True).contiguous() for name, tensor in written.items()},
        out / "adapter_model.safetensors",
    )
    if base and Path(base).is_dir():
        base = str(Path(base).absolute())
    # SGLang does not read rsLoRA's scale: alpha has it
    config = {
        **{"peft_type": "LORA", "peft_version": _LAYOUT_SINCE, "task_type": "CAUSAL_LM"},
        **{"base_model_name_or_path": base or None, "inference_mode": True},
        **{"r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none", "use_rslora": False},
        **{"target_modules": [], **targets},
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _per_expert(
    family: Family, parts: list[WeightPart], factors: Factors, layers: list[int]
) -> Iterator[tuple[str, Tensor]]:
    """A pair for each matrix of each expert: A [L, K] and B [N, L]."""
    for layer in layers:
        for part in parts:
            matrix = part.ours.removeprefix("experts.")[:2]
            name = f"base_model.model.{family.block_name(layer)}.{part.theirs.removesuffix('.weight')}"
            yield f"{name}.lora_A.weight", factors[layer, matrix, "A"][part.expert].T
            yield f"{name}.lora_B.weight", factors[layer, matrix, "B"][part.expert]


def _fused(factors: Factors, layers: list[int]) -> Iterator[tuple[str, Tensor]]:
    """A pair for `gate_up_proj` and one for `down_proj`: A [E M, K] and B [N, M E], whose columns are by rank first.

    M = L if gate and up share one A, as in a folder that peft wrote, else 2 L; all matrices have the same M.
    """
    shared = all(torch.equal(factors[layer, "w1", "A"], factors[layer, "v1", "A"]) for layer in layers)
    for layer in layers:
        a1, b1, a3, b3, a2, b2 = (factors[layer, matrix, factor] for matrix in ("w1", "v1", "w2") for factor in "AB")
        if shared:
            wide_a, halves = a1, (b1, b3)
        else:
            left, right = (0, b1.shape[2]), (b1.shape[2], 0)  # zeros after the columns of a factor, or before them
            wide_a, halves = torch.cat([a1, a3], dim=2), (pad(b1, left), pad(b3, right))
            a2, b2 = pad(a2, left), pad(b2, left)
        wide_b = torch.cat(halves, dim=1)
        # the second target wraps the first, so the names of the first contain `base_layer`
        for place, a_EKM, b_ENM in (("base_layer.", wide_a, wide_b), ("", a2, b2)):
            name = f"{_FUSED.format(layer=layer)}{place}"
            yield f"{name}lora_A.weight", a_EKM.mT.flatten(0, 1)
            yield f"{name}lora_B.weight", b_ENM.permute(1, 2, 0).flatten(1)
