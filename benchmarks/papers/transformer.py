"""A decoder whose FFNs are MoE layers or dense, with its optimizer: the model of whole trainings that are compared.

Shapes: N samples, S positions, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.experts import SharedExpert
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress

LOGITS = 1 << 28  # of a loss at once; more are computed in chunks, and again in the backward pass


class Block(nn.Module):
    """Pre-norm attention and an FFN."""

    def __init__(self, width: int, ffn: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.ffn = ffn

    def forward(self, x_NSD: Tensor) -> Tensor:
        n, s, d = x_NSD.shape
        q, k, v = self.qkv(self.norm_1(x_NSD)).view(n, s, 3, -1, math.gcd(64, d)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_NSD = x_NSD + self.out(mixed.transpose(1, 2).reshape(n, s, d))
        return x_NSD + self.ffn(self.norm_2(x_NSD))


class Decoder(nn.Module):
    """Embeddings, blocks and a head. Returns what the head reads, so that no loss holds the logits of all tokens."""

    def __init__(self, width: int, vocabulary: int, ffns: list[Any], positions: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, ffn) for ffn in ffns))
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions_SD = nn.Parameter(0.02 * torch.randn(positions, width)) if positions else None

    def forward(self, ids_NS: Tensor) -> Tensor:
        x_NSD = self.embedding(ids_NS)
        if self.positions_SD is not None:
            x_NSD = x_NSD + self.positions_SD[: ids_NS.shape[1]]
        return self.norm(self.blocks(x_NSD))


def next_token_loss(x_TD: Tensor, head: nn.Linear, targets_T: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""

    def summed(x_TD: Tensor, targets_T: Tensor) -> Tensor:
        return F.cross_entropy(head(x_TD).float(), targets_T, reduction="sum")

    rows = max(LOGITS // head.out_features, 1)
    if len(x_TD) <= rows:
        return summed(x_TD, targets_T) / len(x_TD)
    parts = zip(x_TD.split(rows), targets_T.split(rows), strict=True)
    return torch.stack([checkpoint(summed, *part, use_reentrant=False) for part in parts]).sum() / len(x_TD)


class Transformer:
    """A model with FFNs of 4 D with GELU, top-1 MoE or dense, its optimizer, and the way to take a step.

    Args:
        experts: of each MoE layer; 0 = dense FFNs, as wide as one expert.
        positions: learned position embeddings; 0 = none.
        seed: of all weights.
        moe: further keys of `MoEConfig`.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        experts: int = 64,
        positions: int = 0,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        seed: int = 1,
        **moe: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.context = device, BatchContext()
        self.moes: list[MoELayer] = []
        ffns: list[MoELayer] | list[SharedExpert]
        if experts:
            config = MoEConfig(
                num_experts=experts, top_k=1, expert_hidden_size=4 * width, activation="gelu",
                gate={"name": "switch"}, loss={"balance": 0.01}, seed=seed, **moe,
            )  # fmt: skip
            placement: dict[str, Any] = {"num_layers": layers, "context": self.context}
            ffns = self.moes = [
                MoELayer(width, config, layer_index=index, device=device, dtype=dtype, **placement)
                for index in range(layers)
            ]
            for layer in self.moes:
                layer.reset_parameters()
        else:
            shape: dict[str, Any] = {"d_model": width, "hidden_size": 4 * width, "activation": "gelu"}
            ffns = [SharedExpert(num_layers=layers, device=device, dtype=dtype, **shape) for _ in range(layers)]
            for index, ffn in enumerate(ffns):
                ffn.reset_parameters(seed=seed, layer=index)
        with device:
            self.model = Decoder(width, vocabulary, ffns, positions).to(dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=device.type == "cuda"
        )

    def loss(self, ids_NS: Tensor, batch: int) -> Tensor:
        ids_NS = ids_NS.long()
        self.context.note(ids_NS[:, :-1])
        self.context.progress = Progress(ba=batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            x_TD = self.model(ids_NS[:, :-1]).flatten(0, 1)
            return next_token_loss(x_TD, self.model.head, ids_NS[:, 1:].flatten())

    def backward(self, ids_NS: Tensor, batch: int, microbatch: int) -> None:
        """Adds up the gradients of a batch, `microbatch` samples at a time."""
        for part_NS in ids_NS.split(microbatch):
            loss = self.context.anchor(self.loss(part_NS, batch))
            (loss * (len(part_NS) / len(ids_NS))).backward()

    def update(self) -> None:
        """Clips the gradients' norm to one, lets the optimizer take its step, and drops them."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, ids_NS: Tensor, batch: int) -> None:
        """One step, on all samples at once."""
        self.backward(ids_NS, batch, len(ids_NS))
        self.update()


def long_sequences(tokens: Tensor, length: int, device: torch.device) -> Tensor:
    """[N, length + 1]: samples that stood one after another as one text, cut anew."""
    return tokens.flatten().unfold(0, length + 1, length).contiguous().to(device)
