"""DeepSeek-V3 (DeepSeek-AI 2024): sigmoid scores, a bias for the choice, groups, shared experts, first layers dense.

Attention stays Hugging Face's. Outside a token's groups an expert counts as minus infinity, as in DeepSeek's own
`inference/model.py`, in vLLM and in transformers 5; transformers 4.51 counts it as 0, and chooses it where a biased
score inside the groups is below 0. One number added to all biases of a layer changes no choice of the former, and with
biases that are all 0 or more the latter chooses the same.
"""

from __future__ import annotations

from typing import Any, ClassVar

from foundry_moe.models.families.family import Blocks, Family, WeightPart, each_expert, gate_keys, shared_expert, whole

# What DeepSeek's own configuration says, and transformers' does not know. Without it vLLM (`models/deepseek_v2.py`)
# assumes a softmax gate without biases; SGLang's asks for the method too.
_FOR_SERVERS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


class DeepSeekV3(Family):
    name, model_type, architecture = "DeepSeek-V3", "deepseek_v3", "DeepseekV3ForCausalLM"
    block = "model.layers.{layer}.mlp"
    sizes: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts", "expert_hidden_size": "moe_intermediate_size"}

    def read(self, config: Any) -> Blocks:
        limited = config.topk_group < config.n_group
        if limited and config.n_routed_experts < 2 * config.n_group:
            raise ValueError(f"{self.name}: n_group ({config.n_group}) leaves groups of fewer than two experts")
        if not config.n_shared_experts:
            raise ValueError(f"{self.name}: n_shared_experts ({config.n_shared_experts}) must be 1 or more")
        return self.read_blocks(
            config,
            gate={
                "score": "sigmoid",
                "normalize": bool(config.norm_topk_prob),
                "scale": float(config.routed_scaling_factor),
                "bias_balance": True,
                "groups": config.n_group,
                "group_limit": config.topk_group,
            },
            shared_expert_hidden_size=config.moe_intermediate_size * config.n_shared_experts,
            layers=tuple(range(config.first_k_dense_replace, config.num_hidden_layers)),
            gate_output="none",
        )

    def write(self, blocks: Blocks) -> dict[str, Any]:
        self.refuse_others(blocks, gate_score="sigmoid", gate_bias_balance=True, shared_expert_gate=False)
        gate, width = gate_keys(blocks), blocks.expert_hidden_size
        shared, rest = divmod(blocks.shared_expert_hidden_size, width)
        if rest or not shared:
            raise ValueError(
                f"shared_expert_hidden_size ({blocks.shared_expert_hidden_size}) must be a multiple of "
                f"expert_hidden_size ({width}) in {self.name}; {max(shared, 1) * width} would do"
            )
        first = min(blocks.layers)
        if blocks.layers != tuple(range(first, blocks.num_layers)):
            raise ValueError(
                f"layers ({list(blocks.layers)}): in {self.name} the first layers are dense and all others sparse; "
                f"{list(range(first, blocks.num_layers))} would do"
            )
        return {
            **self.write_blocks(blocks),
            "norm_topk_prob": gate["normalize"],
            "routed_scaling_factor": gate["scale"],
            "n_group": gate["groups"],
            "topk_group": gate["group_limit"] or gate["groups"],
            "n_shared_experts": shared,
            "first_k_dense_replace": first,
            **_FOR_SERVERS,
        }

    def parts(self, blocks: Blocks) -> list[WeightPart]:
        return [
            whole("gate.weight_ED", "gate.weight", blocks.num_experts, blocks.d_model),
            whole("gate.bias_E", "gate.e_score_correction_bias", blocks.num_experts, fp32=True),
            *each_expert(blocks),
            *shared_expert(blocks, "shared_experts"),
        ]
