"""Training steps of transformers 5 models on one GPU: our experts beside grouped_mm, batched_mm, sonicmoe and eager.

    python -m benchmarks.transformers_step [--shapes qwen3_4 qwen3_9 mixtral gpt_oss] [--experts foundry_moe grouped_mm]
    python -m benchmarks.transformers_step --certify     differences from fp32 eager of every family, in bf16

Random weights in bf16, random tokens, forward and backward and fused AdamW; medians of the steps' times and the peak of
memory. Each line is a fresh model; an implementation that fails has its error in place of its time.

A host without transformers needs the wheels that `scripts/transformers_wheels.sh FOLDER` collects, and there
`pip install --no-index --find-links FOLDER transformers omegaconf xxhash`.
"""

from __future__ import annotations

import argparse
import gc
import statistics

import torch

QWEN3 = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1,
}  # fmt: skip
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4,
}  # fmt: skip
SHAPES = {
    "qwen3_4": ("qwen3_moe", QWEN3 | {"num_hidden_layers": 4}),
    "qwen3_9": ("qwen3_moe", QWEN3 | {"num_hidden_layers": 9}),
    "mixtral": ("mixtral", MIXTRAL),
    "gpt_oss": ("gpt_oss", GPT_OSS),
}
# batched_mm copies an expert's weights for every choice of a token: no training step of these shapes fits
IMPLEMENTATIONS = ["foundry_moe", "grouped_mm", "batched_mm", "sonicmoe", "eager"]


def step_times(shape: str, implementation: str, sequences: int, length: int, steps: int) -> tuple[float, float, float]:
    """(median ms of a step, peak GiB, loss of the last step)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    config = AutoConfig.for_model(kind, vocab_size=32768, use_cache=False, pad_token_id=0, **sizes)
    if kind == "gpt_oss":
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_experts_implementation(implementation)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(config.vocab_size, (sequences, length), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(steps + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        end.synchronize()
        if step >= 5:  # the first ones compile and tune kernels
            times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30, loss.item()


def certify() -> None:
    """Prints the largest difference of each family, bf16 on this GPU against fp32 eager."""
    from tests.helpers.transformers_experts import rows

    for dtype in (torch.float32, torch.bfloat16):
        for family, way, largest in rows("cuda", dtype):
            print(f"{dtype!s:16}{family.model:24}{family.experts.__name__:32}{way:8}{largest:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--experts", nargs="+", default=IMPLEMENTATIONS)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--certify", action="store_true")
    asked = parser.parse_args()
    if asked.certify:
        certify()
        return
    from foundry_moe.integrations.transformers import register

    register()
    for shape in asked.shapes:
        for implementation in asked.experts:
            try:
                ms, gib, loss = step_times(shape, implementation, asked.sequences, asked.length, asked.steps)
                print(f"{shape:10}{implementation:14}{ms:9.1f} ms{gib:8.1f} GiB  loss {loss:.4f}", flush=True)
            except Exception as error:  # a comparison that does not run here is a result too
                print(f"{shape:10}{implementation:14}{type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
