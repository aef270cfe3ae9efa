"""OLMoE (Muennighoff et al. 2024): softmax, the top k as they are, every layer sparse."""

from __future__ import annotations

from typing import Any

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, Part, each_expert, gate_keys, whole


class OLMoE(Family):
    name, model_type, architecture = "OLMoE", "olmoe", "OlmoeForCausalLM"
    block = "model.layers.{layer}.mlp"

    def read(self, config: Any) -> Blocks:
        return Blocks(
            d_model=config.hidden_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            expert_hidden_size=config.intermediate_size,
            activation=self.activation(config.hidden_act),
            gate={"name": "topk", "normalize": bool(config.norm_topk_prob)},
            layers=tuple(range(config.num_hidden_layers)),
            num_layers=config.num_hidden_layers,
        )

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX, shared_expert_hidden_size=0)
        self.refuse_dense(blocks)
        return {
            "hidden_size": blocks.d_model,
            "num_hidden_layers": blocks.num_layers,
            "num_experts": blocks.num_experts,
            "num_experts_per_tok": blocks.top_k,
            "intermediate_size": blocks.expert_hidden_size,
            "hidden_act": self.hidden_act(blocks),
            "norm_topk_prob": gate_keys(blocks)["normalize"],
        }

    def parts(self, blocks: Blocks) -> list[Part]:
        return [
            whole("gate.weight_ED", "gate.weight", blocks.num_experts, blocks.d_model),
            *each_expert(
                blocks,
                w1="experts.{e}.gate_proj.weight",
                v1="experts.{e}.up_proj.weight",
                w2="experts.{e}.down_proj.weight",
            ),
        ]
