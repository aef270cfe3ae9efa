"""Small models with dMoE layers, and commits of them, for the tests of `foundry-moe export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.stores import open_store
from foundry_moe.models.mpt import DMoECausalLM
from foundry_moe.models.native.architecture import KEY, architecture_of

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 32, "activation": "swiglu", "init_std": 0.2}
ROPE = {"rope": True, "rope_impl": "hf"}


def mpt(moe: dict[str, Any] | None = None, attn_config: dict[str, Any] | None = None, **keys: Any) -> DMoECausalLM:
    """A small MPT that leaves as Mixtral unless keys say otherwise; D = F, so that a transposed matrix fits."""
    torch.manual_seed(0)
    model = DMoECausalLM(
        moe={**EXPERTS, **(moe or {})},
        attn_config={**ROPE, **(attn_config or {})},
        **{
            **{"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 1, "max_seq_len": 64, "vocab_size": 96},
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


class Wrapped(nn.Module):
    """As the trainer has it: the model under `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def commit(model: nn.Module, folder: Path, **info: Any) -> Path:
    """A checkpoint of step 7 of the model alone."""
    architecture = architecture_of(model)
    assert architecture is not None
    engine = CheckpointEngine(
        open_store(str(folder)),
        policy=Policy(asynchronous=False),
        info={KEY: architecture.to_info(), "run_name": "small", **info},
    )
    engine.save({"model": model.state_dict()}, 7, {"token": 1234, "sample": 12, "loss": 3.25})
    report = engine.wait()
    assert report is not None and report.error is None
    return folder
