"""What looking for values that are not finite costs of a training step: `python benchmarks/nonfinite.py [--scale 1]`.

The step: 8 layers of OLMoE-1B-7B's experts (2048 wide, 64 SwiGLU experts of 1024, top 8; Muennighoff et al. 2024) and
norms, without attention, 16,384 tokens, fp32 weights under bf16 autocast, AdamW; 3.2 B parameters on one GPU. Such a
step is short for its weights, so a model's share is smaller. `foundry_moe.callbacks.nonfinite.FiniteWatch` is driven as
the callbacks drive it; torch raises an error where it would make the host wait for the device.

Shapes: T tokens, D model width.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from timing import header, queued_ms
from torch import Tensor, nn

from foundry_moe.callbacks.nonfinite import Finding, FiniteWatch
from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer

EXPERTS, TOP_K, TOKENS, WIDTH, HIDDEN, SEQUENCE = 64, 8, 16_384, 2048, 1024, 4096


class Stack(nn.Module):
    """Norms and MoE layers on a residual stream; `scale` divides sizes."""

    def __init__(self, layers: int, device: torch.device, scale: int) -> None:
        super().__init__()
        context = BatchContext()
        config = MoEConfig(
            num_experts=EXPERTS, top_k=TOP_K, expert_hidden_size=HIDDEN // scale, activation="swiglu", loss={}
        )
        width = WIDTH // scale
        self.norms = nn.ModuleList(nn.RMSNorm(width, device=device) for _ in range(layers))
        self.moes = nn.ModuleList(
            MoELayer(width, config, layer_index=i, num_layers=layers, context=context, device=device)
            for i in range(layers)
        )
        for layer in self.moes:
            layer.reset_parameters()
        context.set_tokens(torch.randint(50_000, (TOKENS // SEQUENCE, SEQUENCE // scale), device=device))

    def forward(self, x_TD: Tensor) -> Tensor:
        for norm, moe in zip(self.norms, self.moes, strict=True):
            x_TD = x_TD + moe(norm(x_TD))
        return x_TD


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """An error where the host would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Run:
    """A stack in training; `host_s` holds the host's seconds in the watch, for each step."""

    def __init__(self, layers: int, device: torch.device, scale: int) -> None:
        self.device = device
        self.stack = Stack(layers, device, scale)
        self.x_TD = torch.randn(TOKENS // scale, WIDTH // scale, device=device)
        self.optimizer = torch.optim.AdamW(self.stack.parameters(), lr=1e-5, fused=device.type == "cuda")
        self.watch = FiniteWatch(list(self.stack.named_parameters()))
        self.host_s: list[float] = []
        self.batch = 0

    def step(self, *, watched: bool, spoil: Callable[[], None] = lambda: None) -> None:
        """`spoil` runs after the backward pass."""
        self.batch += 1
        host_s = self.looked_at(lambda: self.watch.before_batch(self.batch, 1)) if watched else 0.0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.stack(self.x_TD).float().square().mean()
        if watched:
            host_s += self.looked_at(lambda: self.watch.after_loss(loss))
        loss.backward()
        spoil()
        if watched:
            host_s += self.looked_at(lambda: (self.watch.after_backward(), self.watch.after_batch()))
            self.host_s.append(host_s)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def looked_at(self, call: Callable[[], object]) -> float:
        """The host's seconds in a call that must not wait."""
        with no_waits(self.device):
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

    def read(self) -> Finding:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        found = self.watch.read()
        assert found is not None
        return found

    def step_ms(self, *, watched: bool, steps: int) -> float:
        """Wall milliseconds per step of several one after another, the device idle before and after them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(watched=watched)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / steps


def read_all(stack: Stack) -> list[Tensor]:
    """The first version of the check: the largest magnitude of every weight and of every gradient."""
    weights = list(stack.parameters())
    found = []
    for tensors in (weights, [weight.grad for weight in weights if weight.grad is not None]):
        norms = torch.stack(torch._foreach_norm([tensor.detach() for tensor in tensors], float("inf")))
        found.append(torch.isfinite(norms))
    return found


def finds_what_is_bad(run: Run) -> None:
    """One bad element of a weight, and of an operand of a gradient, are named, and nothing else is."""
    name = "moes.1.experts.w2_EDF"
    weights = dict(run.stack.named_parameters())

    def spoil_gradient() -> None:
        gradient = weights[name].grad
        assert gradient is not None
        gradient[3, 5, :] = float("inf")

    before = weights[name].detach().clone()
    run.step(watched=True, spoil=spoil_gradient)
    found = run.read()
    assert found.gradients == [name] and not found.loss and not found.weights, found
    with torch.no_grad():
        weights[name].copy_(before)
        weights[name][3, 5, 7] = float("nan")
    run.step(watched=True)
    found = run.read()
    assert found.loss and found.weights == [name], found.weights
    print(f"found: a bad row of a gradient, and a bad number of a weight's {before.numel():,}, by name")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=int, default=1, help="divide sizes, to try this on a CPU")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        print(header())
    run = Run(arguments.layers, device, arguments.scale)
    parameters = sum(parameter.numel() for parameter in run.stack.parameters())
    print(f"{parameters / 1e9:.2f} B parameters in {len(list(run.stack.parameters()))} tensors")
    for _ in range(3):
        run.step(watched=True)
    run.host_s.clear()
    pairs = [(run.step_ms(watched=False, steps=3), run.step_ms(watched=True, steps=3)) for _ in range(arguments.rounds)]
    without, beside = (statistics.median(times) for times in zip(*pairs, strict=True))
    loss = run.stack(run.x_TD[:16]).square().mean()
    loss.backward()  # gradients for what follows

    def look() -> None:
        run.watch.before_batch(run.batch, 1)
        run.watch.after_loss(loss)
        run.watch.after_backward()
        run.watch.after_batch()

    check, before = (queued_ms(call, device, arguments.rounds) for call in (look, lambda: read_all(run.stack)))
    host = 1e3 * statistics.median(run.host_s)
    run.optimizer.zero_grad()
    print("| step, ms | with the check, ms | check on the device, ms | of a step | on the host, ms | reading all, ms |")
    print("|---" * 6 + "|")
    print(
        f"| {without:.2f} | {beside:.2f} | {check:.3f} | {check / without:.2%} | {host:.2f} | "
        f"{before:.3f} ({before / without:.2%}) |"
    )
    run.watch.read()
    finds_what_is_bad(run)


if __name__ == "__main__":
    main()
