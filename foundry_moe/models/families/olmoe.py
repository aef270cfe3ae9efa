"""OLMoE (Muennighoff et al. 2024): softmax, the top k, not normalised, every layer sparse."""

from __future__ import annotations

from typing import Any, ClassVar

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, gate_keys


class OLMoE(Family):
    name, model_type, architecture = "OLMoE", "olmoe", "OlmoeForCausalLM"
    block = "model.layers.{layer}.mlp"
    sizes: ClassVar[dict[str, str]] = {"num_experts": "num_experts", "expert_hidden_size": "intermediate_size"}

    def read(self, config: Any) -> Blocks:
        return self.read_blocks(config, {"normalize": bool(config.norm_topk_prob)})

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX, shared_expert_hidden_size=0)
        self.refuse_dense(blocks)
        return {**self.write_blocks(blocks), "norm_topk_prob": gate_keys(blocks)["normalize"]}
