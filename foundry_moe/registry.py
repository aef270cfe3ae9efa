"""What LLM Foundry's entry points name; registration is their work, nothing happens at import."""

from foundry_moe.algorithm import DMoE
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.checkpoint.elastic import ElasticCheckpoint
from foundry_moe.models.attention import sdpa_attention
from foundry_moe.models.mpt import DMoECausalLM, build_dmoe_ffn, init_moe_module

__all__ = [
    "DMoE",
    "DMoECausalLM",
    "ElasticCheckpoint",
    "ExpertLoad",
    "RunReport",
    "build_dmoe_ffn",
    "init_moe_module",
    "sdpa_attention",
]
