"""The runs of `foundry-moe verify` without a YAML: five models, small enough for fp64 on a CPU.

They are runs of LLM Foundry, and are trained and compared as a user's run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foundry_moe.parallel.mesh import Mesh

DEFAULT_MESHES: tuple[Mesh, ...] = (
    (1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2), (1, 1, 8),
)  # fmt: skip
_MODEL: Mapping[str, Any] = {
    "name": "mpt_causal_lm", "init_device": "cpu", "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 6,
    "vocab_size": 40, "no_bias": True, "use_train_metrics": False, "loss_fn": "torch_crossentropy",
    "attn_config": {"attn_impl": "torch"}, "init_config": {"name": "baseline_", "init_std": 0.2},
    "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 24},
}  # fmt: skip
# by name: keys of the experts and of the model
_CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "random, recomputed, in rounds": (
        {"num_experts": 8, "top_k": 3, "loss": {"balance": 0.1, "z": 0.01}, "mesh": {"buffer": 1.0}},
        {"tie_word_embeddings": False},
    ),
    "upcycled, shared expert": (
        # normalised weights of equal experts would leave only rounding in the gate's gradient
        {
            "num_experts": 8, "top_k": 2, "init": "upcycle", "shared_expert_hidden_size": 8, "shared_expert_gate": True,
            "gate": {"name": "topk", "normalize": False},
        },
        {},
    ),
    # with one token in the vocabulary, beside that of padding, and no positions, all hidden states are equal
    "every token to one expert, in rounds, biases": (
        {
            "num_experts": 8, "top_k": 1, "activation": "gelu", "bias": True, "loss": {"z": 0.01},
            "gate": {"name": "topk", "normalize": False}, "mesh": {"buffer": 1.0},
        },
        {"learned_pos_emb": False, "vocab_size": 2},
    ),
    "balance over sequences, expected sizes": (
        {
            "num_experts": 8, "top_k": 2, "gate": {"name": "topk", "score": "sigmoid"}, "loss": {"balance": 0.1},
            "balance_over": "sequence", "mesh": {"sizes": "expected"},
        },
        {},
    ),
    "experts of different widths": (
        {"num_experts": 16, "top_k": 3, "expert_hidden_size": [5, 11, 8, 8, 12, 4, 15, 1] * 2},
        {},
    ),
}  # fmt: skip


def small_cases() -> dict[str, dict[str, Any]]:
    """The runs by name."""
    return {
        name: {
            "seed": 17,
            "max_seq_len": 6,
            "model": {**_MODEL, **model},
            "algorithms": {
                "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.1},
                "dmoe": {"init_std": 0.3, "mesh": {}, **experts},
            },
            "optimizer": {"name": "decoupled_adamw", "weight_decay": 1e-4},
            "fsdp_config": {"activation_checkpointing": "recomputed" in name},
        }
        for name, (experts, model) in _CASES.items()
    }
