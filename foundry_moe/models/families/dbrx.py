"""DBRX (Databricks 2024): softmax, the top k, normalised or not; one tensor holds the matrices of all experts."""

from __future__ import annotations

from typing import Any

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, WeightPart, gate_keys, of_experts, whole


class DBRX(Family):
    name, model_type, architecture = "DBRX", "dbrx", "DbrxForCausalLM"
    block = "transformer.blocks.{layer}.ffn"

    def read(self, config: Any) -> Blocks:
        ffn = config.ffn_config
        if ffn.moe_normalize_expert_weights not in (None, 1, 1.0):
            raise ValueError(
                f"{self.name}: ffn_config.moe_normalize_expert_weights ({ffn.moe_normalize_expert_weights}) divides "
                "by another norm than the sum; 1 or null can be taken over"
            )
        jitter = {"jitter": ffn.moe_jitter_eps} if ffn.moe_jitter_eps else {}
        return Blocks(
            d_model=config.d_model,
            num_experts=ffn.moe_num_experts,
            top_k=ffn.moe_top_k,
            expert_hidden_size=ffn.ffn_hidden_size,
            activation=self.activation(ffn.ffn_act_fn.get("name", "silu")),
            gate={"name": "topk", "normalize": ffn.moe_normalize_expert_weights is not None, **jitter},
            layers=tuple(range(config.n_layers)),
            num_layers=config.n_layers,
            gate_output="probabilities",
        )

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX, shared_expert_hidden_size=0)
        self.refuse_dense(blocks)
        return {
            "d_model": blocks.d_model,
            "n_layers": blocks.num_layers,
            "ffn_config": {
                "ffn_act_fn": {"name": self.hidden_act(blocks)},
                "ffn_hidden_size": blocks.expert_hidden_size,
                "moe_num_experts": blocks.num_experts,
                "moe_top_k": blocks.top_k,
                "moe_normalize_expert_weights": 1.0 if gate_keys(blocks)["normalize"] else None,
            },
        }

    def parts(self, blocks: Blocks) -> list[WeightPart]:
        experts, width, d_model = blocks.num_experts, blocks.expert_hidden_size, blocks.d_model

        def place(matrix: str, e: int, shape: tuple[int, int]) -> dict[str, Any]:
            where = {"their_shape": (experts * width, d_model), "begin": (e * width, 0)}
            return {"theirs": f"experts.mlp.{matrix}", "transposed": matrix == "w2", **where}

        return [whole("gate.weight_ED", "router.layer.weight", experts, d_model), *of_experts(blocks, place)]
