"""Training steps of transformers 5 models on one GPU: our experts beside grouped_mm, batched_mm, sonicmoe and eager.

    python -m benchmarks.transformers_step [--shapes qwen3_4 qwen3_9 mixtral gpt_oss] [--experts foundry_moe grouped_mm]
    python -m benchmarks.transformers_step --certify     every family in fp32 and bf16 against eager
    python -m benchmarks.transformers_step --losses 8 --shapes qwen3_small    losses and gradients against exact experts

Random weights in bf16, random tokens, forward and backward and fused AdamW; medians of the steps' times and the peak of
memory. Each line is a fresh model; an implementation that fails has its error in place of its time.

A host without transformers needs the wheels that `scripts/transformers_wheels.sh FOLDER` collects, and there
`pip install --no-index --find-links FOLDER transformers omegaconf xxhash`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

VOCABULARY = 32768
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
QWEN3_SMALL = QWEN3 | {
    "hidden_size": 1024, "num_attention_heads": 16, "moe_intermediate_size": 384, "num_experts": 32,
    "num_hidden_layers": 4,
}  # fmt: skip
SHAPES = {
    "qwen3_4": ("qwen3_moe", QWEN3 | {"num_hidden_layers": 4}),
    "qwen3_9": ("qwen3_moe", QWEN3 | {"num_hidden_layers": 9}),
    "mixtral": ("mixtral", MIXTRAL),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "qwen3_small": ("qwen3_moe", QWEN3_SMALL),
}
TIMED = ["qwen3_4", "qwen3_9", "mixtral", "gpt_oss"]
# batched_mm copies an expert's weights for every choice of a token: no training step of these shapes fits
IMPLEMENTATIONS = ["foundry_moe", "grouped_mm", "batched_mm", "sonicmoe", "eager"]


def build(shape: str, implementation: str, seed: int = 0) -> Any:
    """A model in bf16 with random weights on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, use_cache=False, pad_token_id=0, **sizes)
    if kind == "gpt_oss":
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_experts_implementation(implementation)
    return model.train()


def step_times(shape: str, implementation: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """(median ms of a step, peak GiB, loss of the last step)."""
    model = build(shape, implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCABULARY, (args.sequences, args.length), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(args.steps + 5):
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


def exact_experts(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Qwen3's experts in fp32, on weights and tokens of any type; the sum is rounded once."""
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for e in range(experts.num_experts):
        token_R, choice_R = torch.where(index_TK == e)
        gate_RF, up_RF = F.linear(x_TD[token_R].float(), experts.gate_up_proj[e].float()).chunk(2, dim=-1)
        y_RD = F.linear(F.silu(gate_RF) * up_RF, experts.down_proj[e].float())
        y_TD = y_TD.index_add(0, token_R, y_RD * weights_TK[token_R, choice_R, None].float())
    return y_TD.to(x_TD.dtype)


def losses(shape: str, args: argparse.Namespace) -> None:
    """Prints how far each implementation's bf16 run is from one whose experts alone compute in fp32, over some seeds.

    `gradient` is the error of the experts' gradients at the first step, relative in norm (with tokens whose gate
    chooses otherwise after rounding); `loss` the difference after 15 steps. Each implementation runs twice per seed:
    `again` is the difference of its two runs, as kernels of attention and embedding add in no fixed order.
    """
    found: dict[str, list[list[float]]] = {}
    for seed in range(args.losses):
        results = {}
        for implementation in ["exact", *args.experts]:
            results[implementation] = [_short_run(shape, implementation, seed, args) for _ in range(2)]
            gc.collect()
            torch.cuda.empty_cache()
        (exact_gradients, exact_loss), _ = results["exact"]
        for implementation, ((gradients, loss), (_, again)) in results.items():
            error = sum(
                ((g.float() - e.float()).norm() ** 2 for g, e in zip(gradients, exact_gradients, strict=True)),
                torch.tensor(0.0),
            )
            norm = sum((e.float().norm() ** 2 for e in exact_gradients), torch.tensor(0.0))
            row = [float(error / norm) ** 0.5, loss - exact_loss, again - loss, loss]
            found.setdefault(implementation, []).append(row)
            print(f"seed {seed} {implementation:14}", *(f"{value:9.5f}" for value in row), flush=True)
    print(f"{shape}: experts, gradient error, loss minus exact (mean, standard deviation, largest), again (largest)")
    for implementation, rows in found.items():
        gradient, loss, again, _ = zip(*rows, strict=True)
        print(
            f"{implementation:14}{max(gradient):10.5f}{statistics.mean(loss):10.5f}{statistics.pstdev(loss):9.5f}"
            f"{max(map(abs, loss)):9.5f}{max(map(abs, again)):10.5f}"
        )


def _short_run(shape: str, implementation: str, seed: int, args: argparse.Namespace) -> tuple[list[Tensor], float]:
    """The experts' gradients at the first step, on the CPU, and the loss of step 15."""
    model = build(shape, implementation, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCABULARY, (args.sequences, args.length), device="cuda")
    gradients: list[Tensor] = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients = gradients or [p.grad.cpu() for name, p in model.named_parameters() if ".experts." in name]
        optimizer.step()
        optimizer.zero_grad()
    return gradients, loss.item()


def certify() -> None:
    """Prints for each family the largest difference from eager in fp32, and its error over eager's in bf16."""
    from tests.helpers.transformers_experts import rows

    for dtype in (torch.float32, torch.bfloat16):
        for family, way, found in rows("cuda", dtype):
            print(f"{dtype!s:16}{family.model:24}{family.experts.__name__:32}{way:8}{found:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=TIMED, choices=list(SHAPES))
    parser.add_argument("--experts", nargs="+", default=IMPLEMENTATIONS)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--certify", action="store_true")
    parser.add_argument("--losses", type=int, metavar="SEEDS")
    args = parser.parse_args()
    if args.certify:
        certify()
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from foundry_moe.integrations.transformers import register

    register()
    ALL_EXPERTS_FUNCTIONS.register("exact", exact_experts)
    for shape in args.shapes:
        if args.losses:
            losses(shape, args)
            continue
        for implementation in args.experts:
            try:
                ms, gib, loss = step_times(shape, implementation, args)
                print(f"{shape:10}{implementation:14}{ms:9.1f} ms{gib:8.1f} GiB  loss {loss:.4f}", flush=True)
            except Exception as error:  # a comparison that does not run here is a result too
                print(f"{shape:10}{implementation:14}{type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
