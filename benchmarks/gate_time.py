"""Gate and routing of every gate on a GPU, as a share of the layer: `python benchmarks/gate_time.py [--profile]`.

16,384 tokens, 2048 wide, 64 SwiGLU experts of 1024 (OLMoE-1B-7B, Muennighoff et al. 2024), bf16, forward and backward,
with each gate's own losses. Gates with fewer or more choices have smaller or larger layers: the last column is their
time over the layer of OLMoE's 8 choices.

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import header, queued_ms
from torch import Tensor

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext, GateContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from foundry_moe.ops import plan_permute

EXPERTS, TOKENS, WIDTH, HIDDEN, SEQUENCE = 64, 16_384, 2048, 1024, 4096
GATES: list[tuple[dict[str, Any], int]] = [
    ({"name": "topk", "normalize": False}, 8),
    ({"name": "topk", "score": "sigmoid", "bias_balance": True, "groups": 8, "group_limit": 4}, 8),
    ({"name": "topk", "noise": True}, 8),
    ({"name": "ktop1"}, 8),
    ({"name": "hierarchical", "groups": 4}, 8),
    ({"name": "expert_choice"}, 8),
    ({"name": "gshard"}, 2),
    ({"name": "switch"}, 1),
    ({"name": "switch", "jitter": 0.0}, 1),
    ({"name": "hash"}, 1),
    ({"name": "dense_to_sparse", "temperature": 0.87}, 1),
    ({"name": "dense_to_sparse", "temperature": 0.87, "max_experts": 8}, 1),
    ({"name": "base"}, 1),
]


def build(settings: dict[str, Any], top_k: int, device: torch.device, scale: int) -> MoELayer:
    """`scale` divides sizes, to try this on a CPU."""
    context = BatchContext()
    context.progress = Progress(ba=1, dur=0.1)
    config = MoEConfig(
        num_experts=EXPERTS, top_k=top_k, expert_hidden_size=HIDDEN // scale, activation="swiglu", gate=settings
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = MoELayer(WIDTH // scale, config, layer_index=0, num_layers=16, context=context, device=device, dtype=dtype)
    layer.reset_parameters()
    sequence = SEQUENCE // scale
    context.set_tokens(torch.randint(50_000, (TOKENS // SEQUENCE, sequence), device=device))
    return layer


def gate_and_routing(
    layer: MoELayer, x_TD: Tensor, context: GateContext, given: dict[torch.Size, Tensor] | None = None
) -> None:
    """Choices, losses and routes, and the gradients of weights and losses.

    Args:
        given: gradients of the outputs by their shape, filled in; in training it is others that make them.
    """
    given = {} if given is None else given
    choices = layer.gate(x_TD, context)
    plan_permute(choices.experts_TK, layer.num_experts, choices.rows)
    outputs = [choices.weights_TK, *choices.losses.values()]
    outputs = [o for o in outputs if o.requires_grad]
    if outputs:
        for output in outputs:
            if output.shape not in given:
                given[output.shape] = torch.ones_like(output)
        torch.autograd.backward(outputs, [given[o.shape] for o in outputs])
        x_TD.grad = None
        layer.gate.zero_grad()


def step(layer: MoELayer, x_TD: Tensor, direction_TD: Tensor) -> None:
    layer(x_TD).backward(direction_TD)
    for parameter in [*layer.parameters(), x_TD]:
        parameter.grad = None


def print_kernels(run: Callable[[], None]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if event.device_time_total > 0]
    print(f"    {sum(e.device_time_total for e in events):8.1f} us in {sum(e.count for e in events)} kernels")
    for event in events:
        if event.device_time_total > 4:
            print(f"    {event.device_time_total:8.1f} us  {event.count:3d} x {event.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=int, default=1, help="divide sizes, to try this on a CPU")
    parser.add_argument("--profile", action="store_true", help="kernels of each gate as well")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        print(header())
    print("| gate | choices per token | gate + routing, ms | layer, ms | share of its layer | of OLMoE's layer |")
    print("|---" * 6 + "|")
    olmoe = 0.0
    for settings, top_k in GATES:
        layer = build(settings, top_k, device, arguments.scale)
        dtype = next(layer.experts.parameters()).dtype
        tokens, width = TOKENS // arguments.scale, WIDTH // arguments.scale
        x_TD = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
        direction_TD = torch.randn_like(x_TD)
        context = layer.context.for_tokens(tokens, losses=layer.wanted_losses, training=True)
        gate_ms = queued_ms(partial(gate_and_routing, layer, x_TD, context, {}), device, arguments.rounds)
        layer_ms = queued_ms(partial(step, layer, x_TD, direction_TD), device, arguments.rounds)
        olmoe = olmoe or layer_ms
        mean = (layer.gate(x_TD, context).experts_TK >= 0).sum().item() / tokens
        name = ", ".join(str(v) if k == "name" else f"{k} {v}" for k, v in settings.items())
        times = f"{gate_ms:.3f} | {layer_ms:.2f} | {gate_ms / layer_ms:.1%} | {gate_ms / olmoe:.1%}"
        print(f"| {name} | {mean:.2f} | {times} |", flush=True)
        if arguments.profile:
            print_kernels(lambda a=(layer, x_TD, context): gate_and_routing(*a))  # type: ignore[misc]


if __name__ == "__main__":
    main()
