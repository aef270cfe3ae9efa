"""Rebuilds the model of a checkpoint from the checkpoint's description, on one process and a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from llmfoundry.models.mpt import MPTForCausalLM
from llmfoundry.models.utils import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.models.mpt import DMoEMPTConfig
from foundry_moe.models.native.architecture import Architecture


def build(architecture: Architecture, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model in evaluation mode, with these tensors as its own.

    Args:
        tensors: by name, without the architecture's prefix; all of one floating-point dtype but for buffers.

    Raises:
        ValueError: tensors are missing or unexpected; names some.
    """
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
        raise ValueError(
            f"the checkpoint's tensors are not those of its architecture: it lacks {lacking[:3]}, and "
            f"{unexpected[:3]} have no place"
        )
    assert len(moe_layers(model)) == len(architecture.layers)
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[batch, positions, vocabulary] in fp32."""
    return model(input_ids=ids).logits.float()
