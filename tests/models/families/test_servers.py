"""What we write of each family is what the loaders of vLLM and SGLang read: names, layouts, and keys of config.json.

The table says, in our words, what each loader does with the tensors of one block, from the files that it names, at the
commits that docs/how-to/export.md names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.models.families import family_of
from tests.helpers.families import MODEL_TYPES, small

Block = dict[str, Tensor]
Matrices = tuple[Tensor, Tensor, Tensor]  # gate [F, D], up [F, D], down [D, F]

VLLM, SGLANG = "vllm/model_executor/models", "python/sglang/srt/models"
SHARED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def one_by_one(gate: str, up: str, down: str) -> Callable[[Block, int], Matrices]:
    """`FusedMoE.make_expert_params_mapping`: a tensor for each matrix of each expert."""
    return lambda block, e: tuple(block[f"experts.{e}.{name}.weight"] for name in (gate, up, down))  # type: ignore[return-value]


def halves(block: Block, e: int) -> Matrices:
    """`GraniteMoeForCausalLM.load_weights`: an expert's rows are gate over up."""
    gate, up = block["input_linear.weight"][e].chunk(2, dim=0)
    return gate, up, block["output_linear.weight"][e]


def rows(block: Block, e: int) -> Matrices:
    """`DbrxExperts.weight_loader`: [E * F, D], of which w2 is transposed."""
    experts = block["router.layer.weight"].shape[0]
    gate, up, down = (block[f"experts.mlp.{name}"].unflatten(0, (experts, -1))[e] for name in ("w1", "v1", "w2"))
    return gate, up, down.T


@dataclass(frozen=True, kw_only=True)
class Loader:
    """
    files: of vLLM and of SGLang.
    block: where the loader has the MoE block of a layer.
    gate: the gate's matrix.
    experts: an expert's matrices, as the loader takes them.
    names: of all tensors of experts, with {e} for one expert's.
    shared: names of tensors beside experts and gate.
    config: keys without which it takes the gate for another.
    """

    files: tuple[str, str]
    block: str
    gate: str
    experts: Callable[[Block, int], Matrices]
    names: tuple[str, ...]
    shared: tuple[str, ...] = ()
    config: tuple[tuple[str, Any], ...] = ()


def projections(vllm: str, sglang: str, **more: Any) -> Loader:
    """Of a family whose blocks are Llama-like MLPs, one per expert."""
    return Loader(
        files=(f"{VLLM}/{vllm}", f"{SGLANG}/{sglang}"),
        block="model.layers.{}.mlp.",
        gate="gate.weight",
        experts=one_by_one("gate_proj", "up_proj", "down_proj"),
        names=tuple(f"experts.{{e}}.{name}" for name in SHARED),
        **more,
    )


LOADERS = {
    "mixtral": Loader(
        files=(f"{VLLM}/mixtral.py", f"{SGLANG}/mixtral.py"),
        block="model.layers.{}.block_sparse_moe.",
        gate="gate.weight",
        experts=one_by_one("w1", "w3", "w2"),
        names=("experts.{e}.w1.weight", "experts.{e}.w2.weight", "experts.{e}.w3.weight"),
    ),
    "olmoe": projections("olmoe.py", "olmoe.py"),
    "qwen3_moe": projections("qwen3_moe.py", "qwen3_moe.py"),
    "qwen2_moe": projections(
        "qwen2_moe.py",
        "qwen2_moe.py",
        shared=(*(f"shared_expert.{name}" for name in SHARED), "shared_expert_gate.weight"),
    ),
    "deepseek_v3": projections(
        "deepseek_v2.py",
        "deepseek_common/deepseek_weight_loader.py",
        shared=(*(f"shared_experts.{name}" for name in SHARED), "gate.e_score_correction_bias"),
        # vLLM has biases with this method alone; its scores are a softmax by default
        config=(("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("moe_layer_freq", 1)),
    ),
    "granitemoe": Loader(
        files=(f"{VLLM}/granitemoe.py", f"{SGLANG}/granitemoe.py"),
        block="model.layers.{}.block_sparse_moe.",
        gate="router.layer.weight",
        experts=halves,
        names=("input_linear.weight", "output_linear.weight"),
    ),
    "dbrx": Loader(
        files=(f"{VLLM}/dbrx.py", f"{SGLANG}/dbrx.py"),
        block="transformer.blocks.{}.ffn.",
        gate="router.layer.weight",
        experts=rows,
        names=("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"),
    ),
}


def test_every_family_has_a_loader_and_the_page_names_its_file() -> None:
    assert set(LOADERS) == set(MODEL_TYPES)
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "export.md").read_text()
    for loader in LOADERS.values():
        assert all(Path(file).name in page for file in loader.files)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_servers_loader_finds_each_experts_matrices(model_type: str, tmp_path: Path) -> None:
    model, loader = small(model_type), LOADERS[model_type]
    blocks = family_of(model.config.model_type).read(model.config)
    layers = apply_dmoe(model, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in layers:
        prefix = loader.block.format(layer.layer_index)
        block = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        experts = {name.format(e=e) for name in loader.names for e in range(blocks.num_experts)}
        assert block.keys() == {loader.gate, *loader.shared} | experts
        assert torch.equal(block[loader.gate], layer.gate.weight_ED)
        for e in range(blocks.num_experts):
            ours = (layer.experts.w1_EFD[e], layer.experts.v1_EFD[e], layer.experts.w2_EDF[e])
            assert all(torch.equal(a, b) for a, b in zip(loader.experts(block, e), ours, strict=True))
    config = AutoConfig.from_pretrained(tmp_path)
    assert all(getattr(config, key) == value for key, value in loader.config)
