"""Sends weights of copied experts to the ranks that compute with a copy, and gradients of copies back.

Independent of tokens and of how copies are planned (`layers/hot_experts.py`).

Shapes: e own experts of this rank, N slots for copies, R of them in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from foundry_moe.layers.hot_experts import HotExperts, WeightTraffic
from foundry_moe.parallel.collectives import all_to_all


class _Fetch(torch.autograd.Function):
    """Own weights [e, ...] followed by copies of other ranks' weights: [e + N, ...].

    Unused slots are zero, since the sum of biases is a product over all slots. Backward: gradients of copies are sent
    to the owners, which add them to their own one by one, so that results are deterministic.
    """

    @staticmethod
    def forward(
        ctx: Any, traffic: WeightTraffic, copies: int, group: dist.ProcessGroup, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.traffic, ctx.group, ctx.experts = traffic, group, own[0].shape[0]
        sent = [len(numbers) for numbers in traffic.sent_P]
        used = slice(ctx.experts, ctx.experts + sum(traffic.received_P))
        slots = [weight.new_empty(ctx.experts + copies, *weight.shape[1:]) for weight in own]
        # slices: an index tensor made on the host would have to be copied to the device first
        leaving = [torch.cat([weight[:0], *(weight[n : n + 1] for n in chain(*traffic.sent_P))]) for weight in own]
        under_way = [
            all_to_all(rows, sent, traffic.received_P, group, place[used])
            for rows, place in zip(leaving, slots, strict=True)
        ]
        for weight, place in zip(own, slots, strict=True):
            place[: ctx.experts] = weight  # while copies travel
            place[used.stop :] = 0
        for wait in under_way:
            wait()
        return tuple(slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = [len(numbers) for numbers in ctx.traffic.sent_P]
        used = slice(ctx.experts, ctx.experts + sum(ctx.traffic.received_P))
        under_way = [all_to_all(gradient[used], ctx.traffic.received_P, sent, ctx.group) for gradient in gradients]
        own = [gradient[: ctx.experts] for gradient in gradients]  # may be changed: only the experts read these weights
        for gradient, wait in zip(own, under_way, strict=True):
            parts = wait().split(sent)
            for numbers, part in zip(ctx.traffic.sent_P, parts, strict=True):
                for number, added in zip(numbers, part, strict=True):
                    gradient[number] += added
        return None, None, None, *own


def append_copies(
    hot: HotExperts, group: dist.ProcessGroup, weights: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Each weight [e, ...] with slots for copies behind it: [e + N, ...]. A collective of the group.

    `Experts.with_copies` on a mesh with `hot_experts`, called inside the experts' forward pass, while tokens travel:
    FSDP2 gathers the weights just before it.

    Costs a copy of a rank's own experts, since kernels read one tensor. The copy and the weights of copies are held for
    the backward pass; with activation checkpointing, those of one block at a time.
    """
    present = [weight for weight in weights if weight is not None]
    if hot.traffic is None:
        slots = iter([pad(weight, [0, 0] * (weight.dim() - 1) + [0, hot.copies]) for weight in present])
    else:
        slots = iter(_Fetch.apply(hot.traffic, hot.copies, group, *present))
    return tuple(None if weight is None else next(slots) for weight in weights)
