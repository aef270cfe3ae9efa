"""A decoder whose FFNs are MoE layers or dense, with its optimizer: the model of whole trainings that are compared.

Shapes: N samples, S positions, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
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
from foundry_moe.optim.adamw import FusedAdamW
from foundry_moe.optim.muon import Muon

LOGITS = 1 << 28  # of a loss at once; more are computed in chunks, and again in the backward pass
COMPILED_LOGITS = 1 << 30  # of a compiled loss at once; it keeps them in bf16


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One for all layers and models: functions of tensors alone, so that each shape is compiled once."""
    return torch.compile(function, dynamic=False)


def attend(x_NSD: Tensor, norm_1_D: Tensor, qkv: Tensor, out: Tensor, norm_2_D: Tensor) -> tuple[Tensor, Tensor]:
    """The stream behind pre-norm attention, and what the FFN reads, in the precision of products."""
    n, s, d = x_NSD.shape
    mixed_NSQ = F.linear(F.rms_norm(x_NSD, (d,), norm_1_D), qkv)
    q, k, v = mixed_NSQ.view(n, s, 3, -1, math.gcd(64, d)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_NSD = x_NSD + F.linear(mixed.transpose(1, 2).reshape(n, s, d), out)
    return x_NSD, F.rms_norm(x_NSD, (d,), norm_2_D).to(mixed.dtype)


def dense_ffn(x_NSD: Tensor, w1_FD: Tensor, w2_DF: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x_NSD, w1_FD)), w2_DF)


class Block(nn.Module):
    """Pre-norm attention and an FFN.

    compile: all but a MoE layer, once for all blocks; "blocks": in training a block with a MoE layer whole, by itself.
    """

    def __init__(self, width: int, ffn: nn.Module, compile: bool | str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.ffn = ffn
        self.attend, self.dense_ffn = (compiled(attend), compiled(dense_ffn)) if compile else (attend, dense_ffn)
        self.compute_training: Callable[[Tensor], Tensor] = self.compute
        if not isinstance(ffn, MoELayer):
            return
        if compile == "blocks":
            config: Any = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, 64)  # blocks share a code object
            if not ffn.chooses_by_tokens_alone:  # else values of one layer or batch become constants
                ffn.choose = torch.compiler.disable(ffn.choose)  # type: ignore[method-assign]
            self.attend = attend
            self.compute_training = torch.compile(self.compute, dynamic=False)
        elif compile and (shared := ffn.shared_expert) is not None:
            shared.forward = lambda x_TD: self.dense_ffn(x_TD, shared.w1.weight, shared.w2.weight)

    def forward(self, x_NSD: Tensor) -> Tensor:
        return (self.compute_training if self.training else self.compute)(x_NSD)

    def compute(self, x_NSD: Tensor) -> Tensor:
        weights = self.norm_1.weight, self.qkv.weight, self.out.weight, self.norm_2.weight
        x_NSD, ffn_input_NSD = self.attend(x_NSD, *weights)
        if isinstance(self.ffn, SharedExpert):
            return x_NSD + self.dense_ffn(ffn_input_NSD, self.ffn.w1.weight, self.ffn.w2.weight)
        return x_NSD + self.ffn(ffn_input_NSD)


class Decoder(nn.Module):
    """Embeddings, blocks and a head. Returns what the head reads, so that no loss holds the logits of all tokens."""

    def __init__(self, width: int, vocabulary: int, ffns: list[Any], positions: int, compile: bool | str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, ffn, compile) for ffn in ffns))
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


def summed_loss(x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_T: Tensor) -> Tensor:
    """Cross-entropy in nats."""
    return F.cross_entropy(F.linear(x_TD, weight_VD, bias_V).float(), targets_T, reduction="sum")


def next_token_loss(x_TD: Tensor, head: nn.Linear, targets_T: Tensor, compile: bool = False) -> Tensor:
    """Mean cross-entropy in nats."""
    rows = max((COMPILED_LOGITS if compile else LOGITS) // head.out_features, 1)
    weights = head.weight, head.bias
    if not compile and len(x_TD) <= rows:
        return summed_loss(x_TD, *weights, targets_T) / len(x_TD)
    summed = compiled(summed_loss) if compile else partial(checkpoint, summed_loss, use_reentrant=False)
    pairs = zip(x_TD.split(rows), targets_T.split(rows), strict=True)
    parts = [summed(x_TD, *weights, targets_T) for x_TD, targets_T in pairs]
    return torch.stack(parts).sum() / len(targets_T)


class Transformer:
    """A model with FFNs of 4 D with GELU, MoE or dense, its optimizer, and the way to take a step.

    Args:
        experts: of each MoE layer; 0 = dense FFNs.
        expert_width: of an expert, over D.
        shared_width: of a shared expert, over D; 0 = none.
        dense_layers: so many first layers have dense FFNs of 4 D.
        positions: learned position embeddings; 0 = none.
        gate_lr, expert_lr: factors on the learning rate of gates and of experts.
        optimizer: adamw | muon. adamw_lr: with muon, the factor on the learning rate of all but hidden matrices.
        gate_init, expert_init: factors on their initial weights.
        seed: of all weights.
        compile: all but MoE layers; "blocks": in training these too, which takes longer to begin.
        moe: further keys of `MoEConfig`; top-1 by `switch` unless they say otherwise.
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
        expert_width: float = 4.0,
        shared_width: float = 0.0,
        dense_layers: int = 0,
        positions: int = 0,
        lr: float = 1e-3,
        gate_lr: float = 1.0,
        expert_lr: float = 1.0,
        optimizer: str = "adamw",
        adamw_lr: float = 1.0,
        gate_init: float = 1.0,
        expert_init: float = 1.0,
        weight_decay: float = 0.01,
        seed: int = 1,
        compile: bool | str = False,
        **moe: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.context, self.compile = device, BatchContext(), compile
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        keys = {"top_k": 1, "gate": {"name": "switch"}, "loss": {"balance": 0.01}, **moe}
        ffns: list[MoELayer | SharedExpert] = []
        for index in range(layers):
            if not experts or index < dense_layers:
                shape: dict[str, Any] = {"d_model": width, "hidden_size": 4 * width, "activation": "gelu"}
                dense = SharedExpert(num_layers=layers, **shape, **placement)
                dense.reset_parameters(seed=seed, layer=index)
                ffns.append(dense)
                continue
            config = MoEConfig(
                num_experts=experts, expert_hidden_size=int(expert_width * width), activation="gelu",
                shared_expert_hidden_size=int(shared_width * width), seed=seed, **keys,
            )  # fmt: skip
            of_model: dict[str, Any] = {"num_layers": layers, "context": self.context}
            ffns.append(MoELayer(width, config, layer_index=index, **of_model, **placement))
        self.moes = [ffn for ffn in ffns if isinstance(ffn, MoELayer)]
        self.counted: dict[MoELayer, Tensor] = {}
        for layer in self.moes:
            layer.reset_parameters()
            with torch.no_grad():
                for part, factor in ((layer.gate, gate_init), (layer.experts, expert_init)):
                    for parameter in part.parameters():
                        parameter.mul_(factor)
        with device:
            self.model = Decoder(width, vocabulary, ffns, positions, compile).to(dtype)
        factors: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            factor = gate_lr if ".gate." in name else expert_lr if ".experts." in name else 1.0
            factors.setdefault(factor, []).append(parameter)
        groups = [{"params": parameters, "factor": factor, "lr": lr * factor} for factor, parameters in factors.items()]
        self.optimizer: FusedAdamW
        if optimizer == "muon":
            for group in groups:
                group |= {"adamw_lr": adamw_lr * group["lr"], "weight_decay": weight_decay * group["lr"]}  # type: ignore[operator]
            self.optimizer = Muon(groups, model=self.model)
        else:
            for group in groups:
                group |= {"initial_lr": group["lr"], "weight_decay": weight_decay * group["lr"]}  # type: ignore[operator]
            self.optimizer = FusedAdamW(groups, {"betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False})
        self.set_lr(lr)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]

    def loss(self, ids_NS: Tensor, batch: int) -> Tensor:
        ids_NS = ids_NS.long()
        self.context.set_tokens(ids_NS[:, :-1])
        self.context.progress = self.progress = Progress(ba=batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            x_TD = self.model(ids_NS[:, :-1]).flatten(0, 1)
            return next_token_loss(x_TD, self.model.head, ids_NS[:, 1:].flatten(), bool(self.compile))

    def backward(self, ids_NS: Tensor, batch: int, microbatch: int) -> None:
        """Adds up the gradients of a batch, `microbatch` samples at a time."""
        for part_NS in ids_NS.split(microbatch):
            loss = self.context.track_scale(self.loss(part_NS, batch))
            (loss * (len(part_NS) / len(ids_NS))).backward()

    def update(self) -> None:
        """Clips the gradients' norm to one, lets the optimizer take its step, and drops them."""
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.gradient_factor = (1 / (norm + 1e-6)).clamp(max=1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for layer in self.moes:
            if layer.uses_loads:
                counts_E = layer.statistics.counts_E.clone()
                layer.after_step(counts_E - self.counted.get(layer, 0), self.progress)
                self.counted[layer] = counts_E

    def reset_statistics(self) -> None:
        """Starts the sums of loads and losses anew."""
        self.counted.clear()
        for layer in self.moes:
            layer.statistics.reset()

    def step(self, ids_NS: Tensor, batch: int) -> None:
        """One step, on all samples at once."""
        self.backward(ids_NS, batch, len(ids_NS))
        self.update()


def long_sequences(tokens: Tensor, length: int, device: torch.device) -> Tensor:
    """[N, length + 1]: samples that stood one after another as one text, cut anew."""
    return tokens.flatten().unfold(0, length + 1, length).contiguous().to(device)
