"""Mixtral (Jiang et al. 2024): softmax, the top k normalised, every layer sparse."""

from __future__ import annotations

from typing import Any, ClassVar

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, WeightPart, each_expert, whole


class Mixtral(Family):
    name, model_type, architecture = "Mixtral", "mixtral", "MixtralForCausalLM"
    block = "model.layers.{layer}.block_sparse_moe"
    sizes: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts", "expert_hidden_size": "intermediate_size"}

    def read(self, config: Any) -> Blocks:
        # Hugging Face's jitter falls on the experts' input too; ours, as Switch's, on the gate's alone
        jitter = {"jitter": config.router_jitter_noise} if config.router_jitter_noise else {}
        return self.read_blocks(config, {"normalize": True, **jitter})

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX, gate_normalize=True, shared_expert_hidden_size=0)
        self.refuse_dense(blocks)
        return {**self.write_blocks(blocks), "router_jitter_noise": 0.0}

    def parts(self, blocks: Blocks) -> list[WeightPart]:
        return [
            whole("gate.weight_ED", "gate.weight", blocks.num_experts, blocks.d_model),
            *each_expert(blocks, w1="w1", v1="w3", w2="w2"),
        ]
