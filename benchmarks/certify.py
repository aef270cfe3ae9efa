"""Times recorded training steps beside plain ones: layers of OLMoE's width on one GPU, fp32 weights, bf16 autocast.

    python benchmarks/certify.py [--layers 7]

Prints the milliseconds of both, the share of a step that a record each tenth step takes, the kernels that it launches
and its waits for the device, and how far a recorded norm and projection are from those of a CPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe import BatchContext, MoEConfig, MoELayer
from foundry_moe.certify import Recorder
from foundry_moe.certify.sketch import Part, sketch

WIDTH, HEADS, SEQUENCES, LENGTH, VOCABULARY = 2048, 16, 4, 4096, 50304
MOE = MoEConfig(num_experts=64, top_k=8, expert_hidden_size=1024, activation="swiglu")
EVERY = 10


class Block(nn.Module):
    """A decoder block without rotary embeddings."""

    def __init__(self, index: int, context: BatchContext) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn = MoELayer(WIDTH, MOE, layer_index=index, context=context, device="cuda")
        self.ffn.reset_parameters()

    def forward(self, x_BSD: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x_BSD)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSD = x_BSD + self.out(heads.transpose(1, 2).flatten(2))
        return x_BSD + self.ffn(self.norms[1](x_BSD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    context = BatchContext()
    with torch.device("cuda"):
        embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        blocks = [Block(index, context) for index in range(arguments.layers)]
    model = nn.Sequential(embedding, *blocks, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids_BS = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), device="cuda")

    def step(recorder: Recorder | None) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        with torch.autocast("cuda", torch.bfloat16):
            logits_BSV = model(ids_BS)
            loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
        del logits_BSV
        loss.backward()
        if recorder is not None:
            recorder.batch(loss)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def calls(recorder: Recorder | None) -> tuple[int, int]:
        """Kernels launched by a step, and its waits for the device; two waits are those of `step`."""
        with torch.profiler.profile() as profiler:
            step(recorder)
        counts = {event.key: event.count for event in profiler.key_averages()}
        launched = sum(count for key, count in counts.items() if re.match(r"cu(da)?LaunchKernel", key))
        return launched, sum(count for key, count in counts.items() if re.match(r"cu.*Synchronize$", key))

    for _ in range(5):
        step(None)
    plain = [step(None) for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(model, optimizer, folder)
        first = step(recorder)  # with weights and states of before
        recorded = [step(recorder) for _ in range(8)]
        launched, waits = calls(recorder)
        recorder.close()
    plain += [step(None) for _ in range(8)]
    own_launched, own_waits = calls(None)
    a, b = statistics.median(plain), statistics.median(recorded)
    numel = sum(parameter.numel() for parameter in model.parameters())
    print(f"{torch.cuda.get_device_name()}: {arguments.layers} layers, {numel / 1e9:.2f} billion parameters")
    print(f"plain step {a:.1f} ms; recorded {b:.1f} ms, the first {first:.1f}; ratio {b / a:.3f}")
    print(f"recorded each {EVERY}th step: {(b - a) / EVERY / a:.2%} of a step")
    print(f"a recorded step launches {launched - own_launched} kernels more and waits {waits - own_waits} times more")
    weight = blocks[0].ffn.experts.w1_EFD.detach()
    found = sketch([Part(weight, (0, 0, 0), tuple(weight.shape))], 3).cpu()
    exact = sketch([Part(weight.cpu(), (0, 0, 0), tuple(weight.shape))], 3)
    off = (found - exact).abs() / exact[:, :1].sqrt()
    print(f"from fp64: squares {float(off[:, 0].max()):.1e} of a norm, projections {float(off[:, 1:].max()):.1e}")


if __name__ == "__main__":
    main()
