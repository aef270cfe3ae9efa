"""The shape of a run's model: widths, and parameters by kind.

An MPT or dMoE model is read from the run's YAML alone. A Hugging Face model is built on the meta device and counted.
This module is independent of meshes and memory.

Letters: D model width, F expert width, E experts, K choices, S sequence length, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foundry_moe.config import ACTIVATIONS, AUTO, MoEConfig
from foundry_moe.flops import looked_up_params, query_width, training_flops
from foundry_moe.launch.foundry_keys import MPTS
from foundry_moe.launch.run_config import MODEL, read_moe
from foundry_moe.schema import UserError, raise_mistakes, section

HUGGING_FACE = "hf_causal_lm"
ADAPTER = r"_[AB]_E[DF]L$"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Widths and counts of a model, and the parameters that follow from them.

    moe_layers: how many of the `layers` blocks have experts.
    query_width, key_width: number of heads times head width, of queries and of keys.
    ffn_hidden, ffn_matrices: of a dense FFN; 3 matrices for a GLU, 2 for an MLP.
    moe: of its layers, without `auto`.
    around_ffn: parameters of a block beside its FFN or MoE layer: attention and norms.
    beside_experts: parameters of an MoE layer outside its experts: gate and shared expert.
    dense_ffn: parameters of an FFN without experts; 0 if there is none.
    outside_blocks: parameters of embeddings, head and last norm.
    looked_up: of these, the parameters that take part in no matrix product.
    fused_loss: the loss is computed without holding all logits (see `foundry_moe.models.loss_head`).
    disabled_dense, disabled_experts: parameters outside experts, and of a layer's experts (of their adapters, if there
        are any), that `optimizer.disable_grad` or `freeze` excludes from training.
    """

    layers: int
    moe_layers: int
    d_model: int
    query_width: int
    key_width: int
    vocab_size: int
    sequence: int
    ffn_hidden: int
    ffn_matrices: int
    moe: MoEConfig
    around_ffn: float
    beside_experts: float
    dense_ffn: float
    outside_blocks: float
    looked_up: int
    fused_loss: bool = False
    disabled_dense: float = 0.0
    disabled_experts: float = 0.0

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """F of every expert, or one number for all."""
        widths = self.moe.expert_hidden_size
        assert not isinstance(widths, str)
        return widths if isinstance(widths, tuple) else (widths,)

    @property
    def expert_hidden(self) -> float:
        """The mean F."""
        return sum(self.expert_widths) / len(self.expert_widths)

    @property
    def expert_matrices(self) -> int:
        return 3 if ACTIVATIONS[self.moe.activation].gated else 2

    @property
    def expert(self) -> float:
        """Parameters of one expert, the mean."""
        bias = (self.expert_matrices - 1) * self.expert_hidden + self.d_model if self.moe.bias is True else 0
        return self.expert_matrices * self.d_model * self.expert_hidden + bias

    @property
    def experts_per_layer(self) -> int:
        return round(self.moe.num_experts * self.expert)

    @property
    def adapter(self) -> float:
        """Parameters of one expert's LoRA adapters. With any, experts themselves are frozen."""
        lora = self.moe.lora_config
        if lora is None:
            return 0
        return len(lora.targets_of(self.moe.activation)) * lora.r * (self.d_model + self.expert_hidden)

    @property
    def adapters_per_layer(self) -> int:
        return round(self.moe.num_experts * self.adapter)

    @property
    def trained_experts_per_layer(self) -> int:
        """Parameters of experts, or of their adapters, that have gradients."""
        return (self.adapters_per_layer or self.experts_per_layer) - round(self.disabled_experts)

    @property
    def trained_share(self) -> float:
        """Of the parameters outside experts."""
        return 1.0 - self.disabled_dense / self.dense

    @property
    def dense(self) -> int:
        """Parameters outside experts."""
        ffns = self.moe_layers * self.beside_experts + (self.layers - self.moe_layers) * self.dense_ffn
        return round(self.layers * self.around_ffn + ffns + self.outside_blocks)

    @property
    def experts(self) -> int:
        return self.moe_layers * self.experts_per_layer

    @property
    def num_params(self) -> int:
        return self.dense + self.experts + self.moe_layers * self.adapters_per_layer

    @property
    def num_active_params(self) -> float:
        """Parameters that a token passes through."""
        return self.dense + self.moe_layers * self.moe.top_k * (self.expert + self.adapter)

    @property
    def flops_per_token(self) -> float:
        multiplied = self.num_active_params - self.looked_up
        return training_flops(multiplied, layers=self.layers, width=self.query_width, sequence=self.sequence)


def read_shape(run: Mapping[str, Any]) -> ModelShape:
    """The shape of a run's model with its experts; `check_whole_run` checks the values."""
    moe, model = read_moe(run), section(run, "model")
    if moe is None:
        raise UserError("the run has no experts: add algorithms.dmoe or model.moe")
    if model.get("name") == HUGGING_FACE:
        return _count_hugging_face(run, moe)
    if model.get("name") not in MPTS:
        raise UserError(
            f"model.name ({model.get('name')}): plan supports {', '.join(MPTS)} and {HUGGING_FACE}; to plan this "
            f"model, give its d_model, n_layers, n_heads, vocab_size and expansion_ratio to {MPTS[0]}, with the same "
            "algorithms.dmoe"
        )
    return _read_mpt(run, moe)


def _read_mpt(run: Mapping[str, Any], moe: MoEConfig) -> ModelShape:
    """MPT's formulas, in the names and defaults of LLM Foundry's keys."""
    model = section(run, "model")
    needed = ("d_model", "n_layers", "n_heads", "vocab_size")
    raise_mistakes(f"model.{key} is missing: plan needs it" for key in needed if key not in model)
    d_model, layers, n_heads, vocab_size = (model[key] for key in needed)
    moe.check_layers_of(layers)
    attention, ffn = section(run, "model", "attn_config"), section(run, "model", "ffn_config")
    kv_heads = {"multihead_attention": n_heads, "multiquery_attention": 1}.get(
        attention.get("attn_type", "multihead_attention"), attention.get("kv_n_heads") or n_heads
    )
    hidden = int(ffn.get("ffn_hidden_size") or d_model * model.get("expansion_ratio", 4))
    gated_ffn = ffn.get("ffn_type", "mptmlp") == "mptglu"
    ffn_matrices = 3 if gated_ffn else 2
    biased = not model.get("no_bias", False)
    head_dim = int(model.get("head_dim") or d_model // n_heads)
    query_width, key_width = n_heads * head_dim, int(kv_heads) * head_dim
    norm = d_model * (2 if biased and "rms" not in str(model.get("norm_type", "low_precision_layernorm")) else 1)
    # the norms of queries and keys are of the attention's own kind
    one_norm = 1 if "rms" in str(attention.get("norm_type", "low_precision_layernorm")) or not biased else 2
    group = head_dim if attention.get("qk_gn") else 0
    normed = (query_width, key_width) if attention.get("qk_ln") else (group, group)
    around = 2 * d_model * (query_width + key_width) + 2 * norm + one_norm * sum(normed)
    of_keys = 2 * (d_model + biased) * key_width + one_norm * normed[1]  # and of values
    dense_ffn = ffn_matrices * d_model * hidden
    if biased:
        around += query_width + 2 * key_width + d_model
        dense_ffn += (ffn_matrices - 1) * hidden + d_model
    moe = replace(
        moe,
        expert_hidden_size=hidden if moe.expert_hidden_size == AUTO else moe.expert_hidden_size,
        activation=("swiglu" if gated_ffn else "gelu") if moe.activation == AUTO else moe.activation,
        bias=moe.bias is True or (moe.bias == AUTO and moe.init == "upcycle" and biased),
    )
    shared = (3 if ACTIVATIONS[moe.activation].gated else 2) * d_model * moe.shared_expert_hidden_size
    shared += d_model if moe.shared_expert_gate else 0
    gate = 0 if moe.gate.get("name") == "hash" else moe.num_experts * d_model * (2 if moe.gate.get("noise") else 1)
    positions = int(model.get("max_seq_len") or 2048)  # of the model, at most; the run's length may be below it
    tied = bool(model.get("tie_word_embeddings", True))
    learned = model.get("learned_pos_emb", True) and not (attention.get("rope") or attention.get("alibi"))
    learned_positions = positions * d_model if learned else 0
    return ModelShape(
        layers=layers,
        moe_layers=sum(moe.selects(index) for index in range(layers)),
        d_model=d_model,
        query_width=query_width,
        key_width=key_width,
        vocab_size=vocab_size,
        sequence=int(run.get("max_seq_len") or positions),
        ffn_hidden=hidden,
        ffn_matrices=ffn_matrices,
        moe=moe,
        around_ffn=around - of_keys * _blocks_without_keys(section(run, "model", "block_overrides")) / layers,
        beside_experts=gate + shared,
        dense_ffn=dense_ffn,
        outside_blocks=(1 if tied else 2) * vocab_size * d_model + learned_positions + norm,
        looked_up=(0 if tied else vocab_size * d_model) + learned_positions,
        fused_loss=_has_fused_loss(model),
    )


def _blocks_without_keys(given: Mapping[str, Any]) -> int:
    """Number of blocks that use the keys and values of another block."""

    def names(blocks: Mapping[str, Any]) -> list[str]:
        inner = [blocks["name"]] if "name" in blocks else [name for item in blocks["order"] for name in names(item)]
        return inner * blocks.get("repeat", 1)

    try:
        settings = [section(given, "overrides", name, "attn_config") for name in (names(given) if given else ())]
    except (AttributeError, KeyError, TypeError):
        raise UserError("model.block_overrides must have `overrides` and `order`, as LLM Foundry's MPTConfig") from None
    return sum("reuse_kv_layer_idx" in attention for attention in settings)


def _has_fused_loss(model: Mapping[str, Any]) -> bool:
    """As `DMoECausalLM` decides on a GPU with Liger-Kernel."""
    reads_logits = (
        model.get("use_train_metrics", True) or model.get("logit_scale") or model.get("final_logit_softcapping")
    )
    fused = model.get("loss_fn", "auto") in ("auto", "fused_linear_crossentropy")
    return model.get("name") == MODEL and fused and not reads_logits


def read_config(model: Mapping[str, Any]) -> Any:
    """The configuration of a run's Hugging Face model, with its overrides, from a folder or transformers' cache."""
    from transformers import AutoConfig

    where = "model.pretrained_model_name_or_path"
    source = model.get("pretrained_model_name_or_path")
    if not isinstance(source, str) or not source:
        raise UserError(f"{where} ({source!r}) must name a folder with a config.json, or a model of the hub")
    try:
        return AutoConfig.from_pretrained(source, **(model.get("config_overrides") or {}))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where} ({source}): its configuration cannot be read: {reason}") from error


def _count_hugging_face(run: Mapping[str, Any], moe: MoEConfig) -> ModelShape:
    """Counts the parameters of the model once its blocks are MoE layers, without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from foundry_moe.layers.lookup import named_moe_layers
    from foundry_moe.models.block_plans import find_blocks
    from foundry_moe.models.conversion import apply_dmoe

    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    def mean(counts: list[int]) -> float:
        return sum(counts) / len(counts) if counts else 0.0

    model = section(run, "model")
    config = read_config(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    found = list(find_blocks(built, None))
    blocks = {block.name: count(block.module) for block in found}
    before, dense = count(built), [block.dense for block in found if block.dense is not None]
    copied = moe.init == "upcycle" or (moe.init == AUTO and bool(model.get("pretrained", True)))
    if copied and moe.bias == AUTO and any(ffn.biases for ffn in dense):
        moe = replace(moe, bias=True)  # experts that are copies of an FFN have its biases
    # counting replaces no weights, so nothing needs to be kept
    apply_dmoe(built, replace(moe, init="random", mesh=None), loaded=False)
    layers = named_moe_layers(built)
    first = next(iter(layers.values()))
    given = section(run, "optimizer").get("disable_grad") or []
    patterns = [given] if isinstance(given, str) else given
    disabled = {True: 0, False: 0}  # of experts, of the rest
    for name, parameter in built.named_parameters():
        of_experts = ".experts." in name
        base = of_experts and first.config.lora_config is not None and not re.search(ADAPTER, name)
        frozen = not parameter.requires_grad or any(re.search(pattern, f"model.{name}") for pattern in patterns)
        if frozen and not base:
            disabled[of_experts] += parameter.numel()
    inside = sum(count(built.get_submodule(name)) for name in blocks)
    around = sum(count(built.get_submodule(name.rpartition(".")[0])) for name in blocks) - inside
    heads = config.num_attention_heads
    # DeepSeek's keys are expanded to all heads; DBRX keeps the number of key heads in a nested configuration
    attention = getattr(config, "attn_config", None)
    key_heads = getattr(config, "num_key_value_heads", None) or getattr(attention, "kv_n_heads", None) or heads
    return ModelShape(
        layers=len(blocks),
        moe_layers=len(layers),
        d_model=config.hidden_size,
        query_width=query_width(config),
        key_width=key_heads * query_width(config) // heads,
        vocab_size=config.vocab_size,
        sequence=int(run.get("max_seq_len") or 2048),
        ffn_hidden=getattr(config, "intermediate_size", 4 * config.hidden_size),
        ffn_matrices=3,
        moe=replace(first.config, mesh=moe.mesh),
        around_ffn=around / len(blocks),
        beside_experts=mean([count(layer) - count(layer.experts) for layer in layers.values()]),
        dense_ffn=mean([size for name, size in blocks.items() if name not in layers]),
        outside_blocks=before - around - sum(blocks.values()),
        looked_up=looked_up_params(built),
        disabled_dense=disabled[False],
        disabled_experts=disabled[True] / len(layers),
    )
