"""Granite-MoE (IBM 2024): softmax of the k largest logits; one tensor holds gate and up projections of all experts.

A softmax of the chosen logits is the softmax of all, the chosen divided by their sum.
"""

from __future__ import annotations

from typing import Any, ClassVar

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, WeightPart, of_experts, whole


class GraniteMoE(Family):
    name, model_type, architecture = "Granite-MoE", "granitemoe", "GraniteMoeForCausalLM"
    block = "model.layers.{layer}.block_sparse_moe"
    sizes: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts", "expert_hidden_size": "intermediate_size"}

    def read(self, config: Any) -> Blocks:
        return self.read_blocks(config, {"normalize": True})

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX, gate_normalize=True, shared_expert_hidden_size=0)
        self.refuse_dense(blocks)
        return self.write_blocks(blocks)

    def parts(self, blocks: Blocks) -> list[WeightPart]:
        experts, width, d_model = blocks.num_experts, blocks.expert_hidden_size, blocks.d_model

        def place(matrix: str, e: int, shape: tuple[int, int]) -> dict[str, Any]:
            if matrix == "w2":
                return {"theirs": "output_linear.weight", "their_shape": (experts, d_model, width), "begin": (e, 0, 0)}
            begin = (e, width if matrix == "v1" else 0, 0)
            return {"theirs": "input_linear.weight", "their_shape": (experts, 2 * width, d_model), "begin": begin}

        return [whole("gate.weight_ED", "router.layer.weight", experts, d_model), *of_experts(blocks, place)]
