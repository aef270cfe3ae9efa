"""How many layers of Qwen3-30B-A3B's width one GPU trains: in full with AdamW, and LoRA adapters of the experts.

    python benchmarks/lora_layers.py [--sequence 2048] [--rank 16] [--checkpointing]

A model is transformers' Qwen3-MoE with our experts: attention, norms, embedding and head are the real ones. In full all
weights are fp32 under autocast to bf16; with LoRA all but the adapters are frozen and bf16. Two small models give the
memory of a layer, and the largest model that should fit is trained; then models of one layer more each, until one runs
out of memory. The floor is 2.5 times the layers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foundry_moe import MoEConfig, MoELayer

D, F, EXPERTS, CHOICES, VOCABULARY = 2048, 768, 128, 8, 151936
STEPS = 3  # AdamW allocates its state in the first


def build(layers: int, rank: int) -> nn.Module:
    """Random weights; rank 0 = no adapters, all trained."""
    config = Qwen3MoeConfig(
        hidden_size=D, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=VOCABULARY, mlp_only_layers=list(range(layers)), intermediate_size=8, use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if rank else torch.float32
    lora = {"r": rank, "alpha": 2 * rank} if rank else None
    keys = MoEConfig(
        num_experts=EXPERTS, top_k=CHOICES, expert_hidden_size=F, activation="swiglu", loss={}, lora=lora,
        gate={"name": "topk", "normalize": True},
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).to(dtype)  # type: ignore[attr-defined]
    if rank:
        model.requires_grad_(False)
    for index, block in enumerate(model.model.layers):
        block.mlp = MoELayer(D, keys, layer_index=index, device="cuda", dtype=dtype)
        if rank:
            for name, parameter in block.mlp.named_parameters():
                parameter.requires_grad_("_A_E" in name or "_B_E" in name)
    return model.train()


def peak_gb(layers: int, rank: int, sequence: int, checkpointing: bool) -> float:
    """Of a few training steps of one sequence.

    Raises:
        torch.OutOfMemoryError: the model does not fit.
    """
    torch.cuda.reset_peak_memory_stats()
    model = build(layers, rank)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(0, VOCABULARY, (1, sequence), device="cuda")
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss of {layers} layers is {float(loss)}")
    return torch.cuda.max_memory_allocated() / 1e9


def tried(
    rank: int, sequence: int, checkpointing: bool, small: tuple[int, int] = (1, 3)
) -> Iterator[tuple[int, float | None]]:
    """Layers and their peak, None for the first that do not fit."""

    def of(layers: int) -> float | None:
        try:
            return peak_gb(layers, rank, sequence, checkpointing)
        except torch.OutOfMemoryError:
            return None
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    peaks = [of(layers) for layers in small]
    yield from zip(small, peaks, strict=True)
    first, second = peaks
    assert first is not None and second is not None, "three layers do not fit"
    each = (second - first) / (small[1] - small[0])
    layers = int((torch.cuda.mem_get_info()[1] / 1e9 - second) / each) + small[1]
    fits = False
    while layers > small[1]:
        peak = of(layers)
        yield layers, peak
        if fits and peak is None:
            return
        fits = fits or peak is not None
        layers += 1 if fits else -1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing of every block")
    arguments = parser.parse_args()
    name, total = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / 1e9
    print(f"{time.strftime('%Y-%m-%d')} {name}, {total:.1f} GB, torch {torch.__version__}")
    most = {}
    for kind, rank in (("full", 0), ("lora", arguments.rank)):
        for layers, peak in tried(rank, arguments.sequence, arguments.checkpointing):
            print(f"{kind}: {layers} layers, " + ("out of memory" if peak is None else f"{peak:.2f} GB"), flush=True)
            most[kind] = max(most.get(kind, 0), layers if peak is not None else 0)
    print(f"layers that fit: {most['full']} in full, {most['lora']} with LoRA: {most['lora'] / most['full']:.1f} times")


if __name__ == "__main__":
    main()
