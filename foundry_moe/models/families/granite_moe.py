"""Granite-MoE (IBM 2024): the softmax of the k largest logits; experts' matrices stand in one tensor, gate over up.

A softmax of the chosen logits is the softmax of all, the chosen divided by their sum.
"""

from __future__ import annotations

from typing import Any

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, Part, whole


class GraniteMoE(Family):
    name, model_type, architecture = "Granite-MoE", "granitemoe", "GraniteMoeForCausalLM"
    block = "model.layers.{layer}.block_sparse_moe"

    def read(self, config: Any) -> Blocks:
        return Blocks(
            d_model=config.hidden_size,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            expert_hidden_size=config.intermediate_size,
            activation=self.activation(config.hidden_act),
            gate={"name": "topk", "normalize": True},
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
        }

    def parts(self, blocks: Blocks) -> list[Part]:
        experts, width, d_model = blocks.num_experts, blocks.expert_hidden_size, blocks.d_model
        up, down = (experts, 2 * width, d_model), (experts, d_model, width)
        kinds = (
            ("w1_EFD", "input_linear.weight", (width, d_model), up, 0),
            ("v1_EFD", "input_linear.weight", (width, d_model), up, width),
            ("w2_EDF", "output_linear.weight", (d_model, width), down, 0),
        )
        return [
            whole("gate.weight_ED", "router.layer.weight", experts, d_model),
            *(
                Part(
                    ours=f"experts.{ours}",
                    expert=e,
                    shape=shape,
                    theirs=theirs,
                    their_shape=their_shape,
                    begin=(e, row, 0),
                )
                for ours, theirs, shape, their_shape, row in kinds
                for e in range(experts)
            ),
        ]
