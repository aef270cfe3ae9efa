"""Qwen3-MoE (Qwen 2025): softmax, the top k normalised or not, some layers dense."""

from __future__ import annotations

from typing import Any, ClassVar

from foundry_moe.models.families.family import SOFTMAX, Blocks, Family, gate_keys


class Qwen3MoE(Family):
    name, model_type, architecture = "Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM"
    block = "model.layers.{layer}.mlp"
    sizes: ClassVar[dict[str, str]] = {"num_experts": "num_experts", "expert_hidden_size": "moe_intermediate_size"}

    def read(self, config: Any) -> Blocks:
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
        layers = range(config.num_hidden_layers) if config.num_experts > 0 else ()
        sparse = tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
        gate = {"normalize": bool(config.norm_topk_prob)}
        return self.read_blocks(config, gate, layers=sparse, **self._read_shared(config))

    def _read_shared(self, config: Any) -> dict[str, Any]:
        return {}

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, **SOFTMAX)
        return {
            **self.write_blocks(blocks),
            "norm_topk_prob": gate_keys(blocks)["normalize"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": sorted(set(range(blocks.num_layers)) - set(blocks.layers)),
            **self._write_shared(blocks),
        }

    def _write_shared(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, shared_expert_hidden_size=0)
        return {}
