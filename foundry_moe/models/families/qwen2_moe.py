"""Qwen2-MoE (Qwen 2024): as Qwen3-MoE, and a shared expert times sigmoid(x w)."""

from __future__ import annotations

from typing import Any

from foundry_moe.models.families.family import Blocks, WeightPart, shared_expert, whole
from foundry_moe.models.families.qwen3_moe import Qwen3MoE


class Qwen2MoE(Qwen3MoE):
    name, model_type, architecture = "Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM"

    def _read_shared(self, config: Any) -> dict[str, Any]:
        return {"shared_expert_hidden_size": config.shared_expert_intermediate_size, "shared_expert_gate": True}

    def _write_shared(self, blocks: Blocks) -> dict[str, Any]:
        if not blocks.shared_expert_hidden_size:
            raise ValueError(f"shared_expert_hidden_size (0): {self.name} has a shared expert; 1 or more would do")
        self.refuse_others(blocks, shared_expert_gate=True)
        return {"shared_expert_intermediate_size": blocks.shared_expert_hidden_size}

    def parts(self, blocks: Blocks) -> list[WeightPart]:
        return [
            *super().parts(blocks),
            *shared_expert(blocks, "shared_expert"),
            whole("shared_expert.gate.weight", "shared_expert_gate.weight", 1, blocks.d_model),
        ]
