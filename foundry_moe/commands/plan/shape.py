"""The shape of a run's model: parameters by kind. That of an MPT or dMoE model is read from the YAML alone, and nothing
is built. Must not know meshes or memory.

Letters: D model width, F expert width, H width of a dense FFN, E experts, K choices, S sequence length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry_moe.config import ACTIVATIONS, AUTO, MoEConfig
from foundry_moe.launch.run_config import read_moe
from foundry_moe.schema import section

MODELS = ("mpt_causal_lm", "dmoe_causal_lm")
HUGGING_FACE = "hf_causal_lm"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Parameters of a model that were counted on it; of a block each is the mean over blocks.

    around_ffn: of a block, beside its FFN or MoE layer: attention and norms.
    beside_experts: of an MoE layer: router and shared expert.
    dense_ffn: of an FFN that stays; 0 where none does.
    """

    around_ffn: float
    beside_experts: float
    dense_ffn: float
    outside_blocks: float


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Widths and counts of a model, and the parameters that follow.

    key_width: heads of keys times head width; D without grouped queries.
    head_width: of queries, where it is not D over their number.
    moe_layers: how many of `layers` have experts.
    expert_matrices, ffn_matrices: 3 for a GLU, 2 for an MLP.
    norm_width: parameters of one norm.
    query_key_norms: parameters of the norms of queries and keys in one attention; 0 = none.
    learned_positions: positions with an embedding of their own; 0 = none.
    expert_hidden: width of an expert; of experts of different widths the mean, with `widest` beside it.
    expert_biased: experts have biases.
    counted: counts that stand in place of MPT's formulas.
    """

    layers: int
    moe_layers: int
    d_model: int
    n_heads: int
    key_width: int
    vocab_size: int
    sequence: int
    tied: bool
    learned_positions: int
    biased: bool
    norm_width: int
    query_key_norms: int = 0
    ffn_hidden: int
    ffn_matrices: int
    num_experts: int
    top_k: int
    expert_hidden: float
    expert_matrices: int
    shared_hidden: int
    has_router: bool
    expert_biased: bool = False
    widest: int | None = None
    head_width: int | None = None
    counted: Counted | None = None

    @property
    def widest_expert(self) -> int:
        return int(self.expert_hidden) if self.widest is None else self.widest

    @property
    def query_width(self) -> int:
        """Heads of queries times head width."""
        return self.d_model if self.head_width is None else self.n_heads * self.head_width

    @property
    def expert(self) -> float:
        """Parameters of one expert, in the mean."""
        bias = (self.expert_matrices - 1) * self.expert_hidden + self.d_model if self.expert_biased else 0
        return self.expert_matrices * self.d_model * self.expert_hidden + bias

    @property
    def experts_a_layer(self) -> int:
        return round(self.num_experts * self.expert)

    @property
    def around_ffn(self) -> float:
        """Parameters of a block's attention and two norms."""
        if self.counted is not None:
            return self.counted.around_ffn
        weights = 2 * self.d_model * (self.query_width + self.key_width)
        bias = self.query_width + 2 * self.key_width + self.d_model if self.biased else 0
        return weights + bias + 2 * self.norm_width + self.query_key_norms

    @property
    def moe_rest(self) -> float:
        """Parameters of an MoE layer beside its experts: router and shared expert."""
        if self.counted is not None:
            return self.counted.beside_experts
        router = self.num_experts * self.d_model if self.has_router else 0
        return router + self.expert_matrices * self.d_model * self.shared_hidden

    @property
    def dense_ffn(self) -> float:
        if self.counted is not None:
            return self.counted.dense_ffn
        bias = (self.ffn_matrices - 1) * self.ffn_hidden + self.d_model if self.biased else 0
        return self.ffn_matrices * self.d_model * self.ffn_hidden + bias

    @property
    def moe_block(self) -> float:
        """Parameters outside the experts of a block that has them."""
        return self.around_ffn + self.moe_rest

    @property
    def dense_block(self) -> float:
        return self.around_ffn + self.dense_ffn

    @property
    def outside_blocks(self) -> float:
        """Embeddings, head and last norm."""
        if self.counted is not None:
            return self.counted.outside_blocks
        tables = 1 if self.tied else 2
        return tables * self.vocab_size * self.d_model + self.learned_positions * self.d_model + self.norm_width

    @property
    def dense(self) -> int:
        """Parameters outside experts."""
        blocks = self.moe_layers * self.moe_block + (self.layers - self.moe_layers) * self.dense_block
        return round(blocks + self.outside_blocks)

    @property
    def experts(self) -> int:
        return self.moe_layers * self.experts_a_layer

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def active(self) -> float:
        """Parameters that a token passes through."""
        return self.dense + self.moe_layers * self.top_k * self.expert

    @property
    def flops_per_token(self) -> float:
        """Forward and backward; attention is not halved for causality, as torchtitan counts."""
        return 6.0 * (self.active - self.looked_up) + 12.0 * self.layers * self.sequence * self.query_width

    @property
    def looked_up(self) -> int:
        """Parameters outside the experts that take part in no product."""
        return (0 if self.tied else self.vocab_size * self.d_model) + self.learned_positions * self.d_model


def _required(model: Mapping[str, Any], key: str) -> int:
    value = model.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model.{key} ({value!r}) must be a whole number of 1 or more")
    return value


def planned_moe(run: Mapping[str, Any]) -> tuple[MoEConfig, Mapping[str, Any] | None]:
    """The run's experts, and its mesh (None where it has none).

    Raises:
        ValueError: the run has no experts, or keys that cannot be.
    """
    config = read_moe(run)
    if config is None:
        raise ValueError("the run has no experts to plan for: neither algorithms.dmoe nor model.moe is there")
    return config, config.mesh if config.mesh is not None else section(run, "algorithms").get("dmoe_mesh")


def read_shape(run: Mapping[str, Any]) -> ModelShape:
    """The shape of the run's model with its experts.

    Raises:
        ValueError: another kind of model, or a value that cannot be.
    """
    model = section(run, "model")
    moe, _ = planned_moe(run)
    if model.get("name") not in MODELS:
        raise ValueError(
            f"model.name ({model.get('name')}): the sizes of {', '.join(MODELS)} are read from YAML, and plan counts "
            f"those of {HUGGING_FACE}; to plan this model, give its d_model, n_layers, n_heads, vocab_size and "
            f"expansion_ratio to {MODELS[0]}, with the same algorithms.dmoe"
        )
    d_model, layers, n_heads = (_required(model, key) for key in ("d_model", "n_layers", "n_heads"))
    attention, ffn = section(run, "model", "attn_config"), section(run, "model", "ffn_config")
    kv_heads = {"multihead_attention": n_heads, "multiquery_attention": 1}.get(
        attention.get("attn_type", "multihead_attention"), attention.get("kv_n_heads") or n_heads
    )
    ratio = model.get("expansion_ratio", 4)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio <= 0:
        raise ValueError(f"model.expansion_ratio ({ratio!r}) must be a number above 0")
    hidden = int(ffn.get("ffn_hidden_size") or d_model * ratio)
    gated_ffn = ffn.get("ffn_type", "mptmlp") == "mptglu"
    gated = gated_ffn if moe.activation == AUTO else ACTIVATIONS[moe.activation].gated
    moe.check_layers_of(layers)
    biased = not model.get("no_bias", False)
    centred = "rms" not in str(model.get("norm_type", "low_precision_layernorm"))
    head_dim = int(model.get("head_dim") or d_model // n_heads)
    given = moe.expert_hidden_size
    widths = given if isinstance(given, tuple) else (hidden if isinstance(given, str) else given,)
    # queries' and keys' norms are of the attention's own kind
    norms = 1 if "rms" in str(attention.get("norm_type", "low_precision_layernorm")) or not biased else 2
    sequence = int(model.get("max_seq_len") or run.get("max_seq_len") or 2048)
    return ModelShape(
        layers=layers,
        moe_layers=sum(moe.selects(index) for index in range(layers)),
        d_model=d_model,
        n_heads=n_heads,
        head_width=head_dim,
        key_width=head_dim * int(kv_heads),
        vocab_size=_required(model, "vocab_size"),
        sequence=sequence,
        tied=bool(model.get("tie_word_embeddings", True)),
        learned_positions=sequence if model.get("learned_pos_emb", True) else 0,
        biased=biased,
        norm_width=d_model * (2 if biased and centred else 1),
        query_key_norms=norms
        * head_dim
        * (n_heads + int(kv_heads) if attention.get("qk_ln") else 2 if attention.get("qk_gn") else 0),
        ffn_hidden=hidden,
        ffn_matrices=3 if gated_ffn else 2,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        expert_hidden=sum(widths) / len(widths) if len(widths) > 1 else widths[0],
        widest=max(widths),
        expert_matrices=3 if gated else 2,
        shared_hidden=moe.shared_expert_hidden_size,
        has_router=moe.gate.get("name") != "hash",
        expert_biased=moe.bias is True or (moe.bias == AUTO and moe.init == "upcycle" and biased),
    )
