"""Whether an exported folder is the checkpoint's model: by tensors, and by logits and generation of plain transformers.

Reads the files through safetensors and the checkpoint, and uses no state of the writer except which tensor is made of
which; the logits check that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.commands.exported_files import INDEX, Weights
from foundry_moe.launch.user_errors import is_users
from foundry_moe.models.native.architecture import Architecture
from foundry_moe.models.native.state_dict import Native
from foundry_moe.models.native.targets import Target, assemble
from foundry_moe.models.native.tokenizer import differences, digest_of, sentence_for
from foundry_moe.models.pretrained import EMBEDDINGS, HEAD
from foundry_moe.schema import UserError

FILE, LOGITS = "certificate.json", "certificate.npz"  # not safetensors: servers read all such files of a folder
TOKENS = (2, 16)  # sequences and positions
GENERATED = 32  # tokens after these
# In standard deviations of the logits. Both models compute in fp32, with sums in different orders; swapped experts, a
# transposed matrix, or gate and up exchanged moved logits by 1e-2 and more in the tests' small random models.
TOLERANCE = 1e-3
HEADROOM = 1.5  # over the fp32 model, for activations and buffers of a load


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A checkpoint and the plan of its export.

    weights: by name without the architecture's prefix.
    dtype: of floating-point tensors; None = as trained.
    tokenizer: of the folder; None = it has none.
    """

    weights: Weights
    architecture: Architecture
    native: Native
    targets: Sequence[Target]
    dtype: str | None
    tokenizer: PreTrainedTokenizerBase | None = None


def certify(exported: Exported, folder: Path, *, with_logits: bool | None, not_copied: Sequence[str]) -> dict[str, Any]:
    """Compares a folder with the checkpoint, and writes the certificate to the folder.

    Writes our model's logits, too, so that those of other programs can be compared with them.

    Args:
        with_logits: None = where the model in fp32 fits into this machine's free memory.
        not_copied: for the certificate, files of the source folder that the export does not have.

    Returns:
        The contents of `certificate.json`. `good`: no `problems`. `tensors`: for each tensor of the folder the
        hash (xxh3, 128 bits) of its bytes, which is also that of the same elements in the checkpoint, cast to the
        folder's dtype. `logits`: of both models on the same tokens, or why they were not compared.
    """
    blocks, commit = exported.native.blocks, exported.weights.found.commit
    hashes: dict[str, str] = {}
    problems = [*_compare_tensors(exported, folder, hashes), *_compare_head(exported)]
    tokenizer = _compare_tokenizer(exported, folder, problems)
    needed = HEADROOM * 4 * sum(target.count for target in exported.targets)
    if with_logits is False:
        logits: dict[str, Any] = {"compared": False, "why": "not asked for"}
    elif with_logits is None and needed > psutil.virtual_memory().available:
        why = f"the model needs {needed / 1e9:.1f} GB in fp32, more than is free"
        logits = {"compared": False, "why": why}
    else:
        logits = _compare_logits(exported, folder, problems)
    certificate = {
        "good": not problems,
        "checkpoint": {
            "folder": exported.weights.store.url,
            "step": commit.step,
            "attempt": commit.attempt,
            "manifest_xxh3": commit.manifest_hash,
        },
        "family": exported.native.family.name,
        "dtype": exported.dtype or "as trained",
        "experts": {"layers": len(blocks.layers), "each": blocks.num_experts},
        "logits": logits,
        "tokenizer": tokenizer,
        "not_copied": list(not_copied),
        "problems": problems,
        "tensors": hashes,
    }
    (folder / FILE).write_text(json.dumps(certificate, indent=1) + "\n")
    return certificate


def _compare_tensors(exported: Exported, folder: Path, hashes: dict[str, str]) -> list[str]:
    """Fills `hashes`; memory holds one file and the checkpoint's tensors that it is made of."""
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    targets = {target.name: target for target in exported.targets}
    problems = [f"{name} is not in the folder" for name in targets if name not in weight_map]
    problems += [f"{name} is in the folder, and the model has no such tensor" for name in weight_map.keys() - targets]
    for file in sorted(set(weight_map.values())):
        there = load_file(folder / file)
        group = [targets[name] for name in there if name in targets]
        held = exported.weights.read({part.ours for target in group for part in target.parts})
        for target in group:
            tensor, written = _cast(assemble(target, held.__getitem__), target, exported.dtype), there[target.name]
            hashes[target.name] = _hash(written)
            if written.dtype != tensor.dtype or written.shape != tensor.shape or hashes[target.name] != _hash(tensor):
                shapes = "" if written.shape == tensor.shape else f": it has the shape {list(written.shape)}"
                problems.append(f"{target.name} is not what the checkpoint has{shapes}")
    absent = [name for name in weight_map if name in targets and name not in hashes]
    return problems + [f"{name} is not in {weight_map[name]}" for name in absent]


def _compare_head(exported: Exported) -> list[str]:
    """A problem if an output projection was trained that the folder does not have, as the configuration ties it."""
    sources = exported.weights.sources
    embedding = next((name for name in sources if name.endswith(EMBEDDINGS)), None)
    if HEAD not in sources or embedding is None or any(t.name == HEAD for t in exported.targets):
        return []
    held = exported.weights.read({HEAD, embedding})
    if torch.equal(held[HEAD], held[embedding]):
        return []
    return [
        f"{HEAD} is not {embedding}, though tie_word_embeddings is true: the run has trained them untied, and the "
        "folder would have the embedding alone"
    ]


def _cast(tensor: Tensor, target: Target, dtype: str | None) -> Tensor:
    if dtype is None or target.keeps_dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(DTYPES[dtype])


def _hash(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _compare_tokenizer(exported: Exported, folder: Path, problems: list[str]) -> dict[str, Any] | None:
    """A sentence with every added token, and its ids by the folder's tokenizer; None without one.

    `ids_of_the_run`: whether the run's tokenizer gave its own sentence these ids; null = the checkpoint does not say.
    """
    tokenizer, recorded = exported.tokenizer, exported.architecture.tokenizer_state.get("ids")
    if tokenizer is None:
        return None
    there = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    found = differences(tokenizer, there)
    if found:
        problems.append(f"the folder's tokenizer differs from the run's in {', '.join(found)}")
    sentence = sentence_for(tokenizer)
    same = None if recorded is None else digest_of(there) == recorded
    return {"sentence": sentence, "ids": there(sentence, verbose=False)["input_ids"], "ids_of_the_run": same}


def _compare_logits(exported: Exported, folder: Path, problems: list[str]) -> dict[str, Any]:
    vocabulary = int(exported.native.config.vocab_size)
    ids = torch.randint(vocabulary, TOKENS, generator=torch.Generator().manual_seed(0))
    longest = int(getattr(exported.native.config, "max_position_embeddings", 0) or TOKENS[1] + GENERATED)
    try:
        model = _ours(exported)
        ours = logits_of(model, ids)
        steps = greedy(model, ids, max(0, min(GENERATED, longest - TOKENS[1])))
        del model
    except Exception as error:  # a checkpoint's configuration may hold anything
        if is_users(error) or isinstance(error, MemoryError):
            raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(f"no model can be built of the checkpoint's configuration: {reason}") from error
    try:
        theirs_model, report = AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # transformers raises many kinds
        problems.append(f"transformers does not load the folder: {error}")
        return {"compared": False, "why": problems[-1]}
    wrong = {key: sorted(names)[:3] for key, names in report.items() if names}
    if wrong:
        problems.append(f"transformers loads the folder with {wrong}")
    raised = _raise_biases(theirs_model)
    theirs = logits_of(theirs_model.eval(), ids)
    scale = float(ours.std())
    difference = float((ours - theirs).abs().max()) / scale if ours.shape == theirs.shape else float("inf")
    if not difference <= TOLERANCE:
        problems.append(
            f"logits differ by {difference:.1e} of their standard deviation, and rounding by {TOLERANCE:g} at most"
        )
    elif steps.shape[1]:
        difference = max(difference, _compare_generation(theirs_model, ids, steps, scale, problems))
    np.savez(folder / LOGITS, tokens=ids.numpy(), logits=ours.numpy())
    return {
        "compared": True,
        "tokens": ids.tolist(),
        "generated": steps.shape[1],
        "standard_deviation": scale,
        "largest_difference": difference,
        "tolerance": TOLERANCE,
        "unit": "standard deviations of the logits",
        "transformers": transformers.__version__,
        "biases_raised": raised,
    }


def _compare_generation(theirs: Any, ids: Tensor, ours: Tensor, scale: float, problems: list[str]) -> float:
    """Generates greedily with the folder's setting of the cache; returns the largest difference of logits in `scale`.

    Args:
        ours: logits [batch, steps, vocabulary] before each token that our model generates.
    """
    settings = {"max_new_tokens": ours.shape[1], "return_dict_in_generate": True, "output_logits": True}
    theirs.generation_config = GenerationConfig(
        **settings, do_sample=False, pad_token_id=0, use_cache=theirs.generation_config.use_cache
    )
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids))
    if out.past_key_values is None:
        problems.append("the folder turns off the KV cache of generation (use_cache)")
    there = torch.stack(out.logits, dim=1).float()
    # after a token that a rounding has changed, two sequences have nothing in common
    same = (there.argmax(-1) == ours.argmax(-1)).cumprod(dim=1).bool()
    compared = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], dim=1)
    difference = float((there - ours).abs().amax(-1)[compared].max()) / scale
    if not difference <= TOLERANCE:
        problems.append(
            f"logits of generation with the KV cache differ by {difference:.1e} of their standard deviation, and "
            f"rounding by {TOLERANCE:g} at most"
        )
    return difference


@torch.no_grad()
def _raise_biases(model: torch.nn.Module) -> bool:
    """Adds a number to all biases of each DeepSeek gate that has one below 0, so that the lowest is 0.

    That number affects choices only in transformers 4.51, which gives experts outside a token's groups a score of 0,
    above any negative score of an expert inside them (5.x gives minus infinity, as this package and servers do).
    """
    negative = [
        biases
        for name, biases in model.state_dict().items()
        if name.endswith("gate.e_score_correction_bias") and (biases < 0).any()
    ]
    for biases in negative:
        biases.sub_(biases.min())
    return bool(negative)


def _ours(exported: Exported) -> torch.nn.Module:
    """Our model in fp32, with weights rounded as the folder's are."""
    tensors = exported.weights.read(exported.weights.sources)
    targets = {part.ours: target for target in exported.targets for part in target.parts}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            rounded = _cast(tensor, targets[name], exported.dtype) if name in targets else tensor
            tensors[name] = rounded.float()
    return build(exported.architecture, tensors)


def build(architecture: Architecture, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A checkpoint's model on the CPU, in evaluation mode, with these tensors as its own.

    Args:
        tensors: by name, without the architecture's prefix; all of one floating-point dtype but for buffers.
    """
    from llmfoundry.models.mpt import MPTForCausalLM
    from llmfoundry.models.utils import init_empty_weights

    from foundry_moe.models.conversion import apply_dmoe
    from foundry_moe.models.mpt import DMoEMPTConfig

    config = dict(architecture.config)
    model: Any
    if architecture.model_type == "mpt":
        config["init_device"] = "meta"
        config["attn_config"] = {**config["attn_config"], "attn_impl": "torch"}
        model = MPTForCausalLM(DMoEMPTConfig(**config))
    else:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    experts = replace(architecture.experts, layers=architecture.layers, mesh=None, backend="auto", init="random")
    apply_dmoe(model, experts)
    _, unexpected = model.load_state_dict(dict(tensors), strict=False, assign=True)
    model.tie_weights()
    lacking = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if lacking or unexpected:
        raise UserError(
            f"the checkpoint's tensors are not those of its architecture: it lacks {lacking[:3]}, and "
            f"{unexpected[:3]} have no place"
        )
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[batch, positions, vocabulary] in fp32."""
    return model(input_ids=ids).logits.float()


@torch.no_grad()
def greedy(model: nn.Module, ids: Tensor, steps: int) -> Tensor:
    """Logits [batch, steps, vocabulary] before each of the most probable next tokens, without a KV cache."""
    found = []
    for _ in range(steps):
        found.append(logits_of(model, ids)[:, -1])
        ids = torch.cat([ids, found[-1].argmax(-1, keepdim=True)], dim=1)
    return torch.stack(found, dim=1) if found else torch.empty(len(ids), 0, 0)
