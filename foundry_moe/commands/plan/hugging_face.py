"""The shape of a Hugging Face model with dMoE layers, counted on one that is built without memory for its weights.

Only the configuration is read, from a folder or from the cache that transformers keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from foundry_moe.commands.plan.shape import Counted, ModelShape
from foundry_moe.config import ACTIVATIONS, AUTO, MoEConfig
from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.models.block_plans import find_blocks
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.schema import section


def count_shape(run: Mapping[str, Any], experts: MoEConfig) -> ModelShape:
    """The shape of a run's `hf_causal_lm` once its blocks are MoE layers.

    Raises:
        ValueError: no configuration, or a model whose blocks cannot be taken over, as training would say.
    """
    model = section(run, "model")
    config = read_config(model)
    built = _build(config)
    found = list(find_blocks(built, None))
    blocks = {block.name: _count(block.module) for block in found}
    before = _count(built)
    copied = experts.init == "upcycle" or (experts.init == AUTO and bool(model.get("pretrained", True)))
    if copied and experts.bias == AUTO and any(block.dense is not None and block.dense.biases for block in found):
        experts = replace(experts, bias=True)  # as those that they are copied from
    # what the weights are is not asked for, so none is thrown away
    apply_dmoe(built, replace(experts, init="random", mesh=None), loaded=False)
    layers = named_moe_layers(built)
    if not layers:
        raise ValueError(
            f"model.pretrained_model_name_or_path ({model.get('pretrained_model_name_or_path')}): {config.model_type} "
            "has no feed-forward block that algorithms.dmoe can replace"
        )
    first = next(iter(layers.values()))
    dense = [size for name, size in blocks.items() if name not in layers]
    around = sum(_count(built.get_submodule(name.rpartition(".")[0])) for name in blocks)
    inside = sum(_count(built.get_submodule(name)) for name in blocks)
    heads = config.num_attention_heads
    # DeepSeek's head_dim is that of positions alone; its keys are expanded to all heads
    head_width = (
        getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    )
    # DBRX has its heads of keys in a configuration of its own
    attention = getattr(config, "attn_config", None)
    key_heads = getattr(config, "num_key_value_heads", None) or getattr(attention, "kv_n_heads", None) or heads
    width = first.config.expert_hidden_size
    assert isinstance(width, int)
    return ModelShape(
        layers=len(blocks),
        moe_layers=len(layers),
        d_model=config.hidden_size,
        n_heads=heads,
        head_width=head_width,
        key_width=head_width * key_heads,
        vocab_size=config.vocab_size,
        sequence=int(run.get("max_seq_len") or 2048),
        tied=bool(config.tie_word_embeddings),
        learned_positions=0,
        biased=False,
        norm_width=config.hidden_size,
        ffn_hidden=getattr(config, "intermediate_size", width),
        ffn_matrices=3,
        num_experts=first.num_experts,
        top_k=first.config.top_k,
        expert_hidden=width,
        expert_matrices=3 if ACTIVATIONS[first.config.activation].gated else 2,
        shared_hidden=first.config.shared_expert_hidden_size,
        has_router=first.config.gate.get("name") != "hash",
        expert_biased=first.config.bias is True,
        counted=Counted(
            around_ffn=(around - inside) / len(blocks),
            beside_experts=_mean([_count(layer) - _count(layer.experts) for layer in layers.values()]),
            dense_ffn=_mean(dense),
            outside_blocks=before - (around - inside) - sum(blocks.values()),
        ),
    )


def read_config(model: Mapping[str, Any]) -> Any:
    """The configuration of a run's Hugging Face model, with its overrides.

    Raises:
        ValueError: no name is given, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    where = "model.pretrained_model_name_or_path"
    source = model.get("pretrained_model_name_or_path")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where} ({source!r}) must name a folder with a config.json, or a model of the hub")
    try:
        return AutoConfig.from_pretrained(source, **(model.get("config_overrides") or {}))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} ({source}): its configuration cannot be read: {reason}") from error


def _build(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _mean(counts: list[int]) -> float:
    return sum(counts) / len(counts) if counts else 0.0
