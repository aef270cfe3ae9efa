"""Mixtral (Jiang et al. 2024): softmax, the top k normalised, every layer sparse."""

from __future__ import annotations

from typing import Any

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, Part, each_expert, whole


class Mixtral(Family):
    name, model_type, architecture = "Mixtral", "mixtral", "MixtralForCausalLM"
    block = "model.layers.{layer}.block_sparse_moe"

    def read(self, config: Any) -> Blocks:
        # Hugging Face's jitter falls on the experts' input too; ours, as Switch's, on the router's alone
        jitter = {"jitter": config.router_jitter_noise} if config.router_jitter_noise else {}
        return Blocks(
            d_model=config.hidden_size,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            expert_hidden_size=config.intermediate_size,
            activation=self.activation(config.hidden_act),
            gate={"name": "topk", "normalize": True, **jitter},
            layers=tuple(range(config.num_hidden_layers)),
            num_layers=config.num_hidden_layers,
        )

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX, gate_normalize=True, shared_expert_hidden_size=0)
        self.refuse_dense(blocks)
        return {
            "hidden_size": blocks.d_model,
            "num_hidden_layers": blocks.num_layers,
            "num_local_experts": blocks.num_experts,
            "num_experts_per_tok": blocks.top_k,
            "intermediate_size": blocks.expert_hidden_size,
            "hidden_act": self.hidden_act(blocks),
            "router_jitter_noise": 0.0,
        }

    def parts(self, blocks: Blocks) -> list[Part]:
        return [
            whole("gate.weight_ED", "gate.weight", blocks.num_experts, blocks.d_model),
            *each_expert(blocks, w1="experts.{e}.w1.weight", v1="experts.{e}.w3.weight", w2="experts.{e}.w2.weight"),
        ]
