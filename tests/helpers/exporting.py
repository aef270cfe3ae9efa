"""Small models with dMoE layers, and commits of them, for the tests of `foundry-moe export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.cli import main
from foundry_moe.models.families import family_of
from foundry_moe.models.mpt import DMoECausalLM
from foundry_moe.models.native.architecture import KEY, architecture_of
from tests.helpers.families import MODEL_TYPES, SPREAD, WIDTH, small

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 32, "activation": "swiglu", "init_std": 0.2}
ROPE = {"rope": True, "rope_impl": "hf"}


def mpt(moe: dict[str, Any] | None = None, attn_config: dict[str, Any] | None = None, **keys: Any) -> DMoECausalLM:
    """A small MPT that leaves as Mixtral unless keys say otherwise; D = F, so that a transposed matrix fits."""
    torch.manual_seed(0)
    model = DMoECausalLM(
        moe={**EXPERTS, **(moe or {})},
        attn_config={**ROPE, **(attn_config or {})},
        **{
            **{
                "d_model": WIDTH,
                "n_heads": 4,
                "n_layers": 2,
                "expansion_ratio": 1,
                "max_seq_len": 64,
                "vocab_size": 96,
            },
            **{"no_bias": True, "norm_type": "low_precision_rmsnorm", "tie_word_embeddings": False},
            **{"learned_pos_emb": False, "use_train_metrics": False},
            "init_config": {"name": "baseline_", "init_std": 0.2},
            **keys,
        },
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "_ln" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


MPTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral, tied, grouped queries": {
        "tie_word_embeddings": True,
        "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2},
    },
    "mixtral, narrow heads": {
        "head_dim": WIDTH // 8,
        "attn_config": {"fused_qkv": False, "softmax_scale": (WIDTH // 8) ** -0.5},
    },
    "mixtral, apart": {
        "attn_config": {"fused_qkv": False, "attn_type": "multiquery_attention"},
        "moe": {"activation": "geglu"},
    },
    "olmoe": {
        "attn_config": {"qk_ln": True, "norm_type": "rmsnorm"},
        "moe": {"gate": {"name": "topk", "normalize": False}},
    },
    "olmoe, switch": {
        "attn_config": {"qk_ln": True, "norm_type": "rmsnorm"},
        "moe": {"gate": {"name": "switch"}, "top_k": 1},
    },
    "qwen3_moe, wide heads": {
        "head_dim": WIDTH // 2,
        "attn_config": {
            **{"attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_gn": True, "norm_type": "rmsnorm"},
            **{"fused_qkv": False, "softmax_scale": (WIDTH // 2) ** -0.5, "rope_theta": 1000000},
        },
    },
    "qwen3_moe, every other layer": {
        "attn_config": {"qk_gn": True, "norm_type": "rmsnorm"},
        "ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}},
        "moe": {"layers": {"every": 2}},
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
STRETCHED = "qwen3, stretched rope"  # not for transformers 5, which reads these keys of yarn otherwise than 4.51
BELOW_ZERO = "deepseek_v3, biases below zero"  # where transformers 4.51 chooses otherwise than all others
MODEL_KINDS = ("llama", "mistral", "qwen3", *MODEL_TYPES)


class Wrapped(nn.Module):
    """As the trainer has it: the model under `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def commit(model: nn.Module, folder: Path, steps: tuple[int, ...] = (7,), **info: Any) -> Path:
    """Checkpoints of the model alone."""
    architecture = architecture_of(model)
    assert architecture is not None
    engine = CheckpointEngine(
        open_store(str(folder)),
        policy=Policy(asynchronous=False),
        info={KEY: architecture.to_info(), "run_name": "small", **info},
    )
    for step in steps:
        engine.save({"model": model.state_dict()}, step, {"token": 1234, "sample": 12, "loss": 3.25})
        report = engine.wait()
        assert report is not None and report.error is None
    return folder


def of_hugging_face(kind: str) -> nn.Module:
    """A small model of transformers that was given dMoE layers."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 61, "initializer_range": SPREAD}
    torch.manual_seed(4)
    dense = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=WIDTH // 4)),
        STRETCHED: lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=WIDTH // 4, rope_scaling=YARN)),
    }
    if kind in dense:
        model = dense[kind]()
        layers: Any = {"every": 2} if kind.startswith("qwen3") else "all"
        apply_dmoe(model, MoEConfig(num_experts=4, top_k=2, init="upcycle", layers=layers))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model
    native = small(kind.partition(",")[0])
    if kind == BELOW_ZERO:
        for name, buffer in native.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-3.0, -1.0)
    blocks = family_of(native.config.model_type).read(native.config)
    apply_dmoe(native, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k))
    return native


def export_all(folder: Path) -> None:
    """Exports one model of each kind to `folder/KIND/exported`, for another program to read."""
    models = {name: mpt(**keys) for name, keys in MPTS.items()}
    models |= {f"hugging face {kind}": Wrapped(of_hugging_face(kind)) for kind in (*MODEL_KINDS, BELOW_ZERO)}
    for name, model in models.items():
        place = folder / name.replace(",", "").replace(" ", "_")
        run = commit(model, place / "run")
        try:
            main(["export", str(run), str(place / "exported"), "--certify"])
        except SystemExit as ended:
            if ended.code:
                raise


if __name__ == "__main__":
    export_all(Path(sys.argv[1]))
