"""Launches every Triton kernel there is once or more, at a layer's sizes: for `compiling`, where nothing runs."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import foundry_moe_kernels
import torch
from foundry_moe_kernels import (
    adamw,
    assignment,
    block_products,
    descriptors,
    dispatch_plan,
    expert_products,
    finite,
    gate_logits,
    low_rank,
    mean,
    muon,
    noise,
    permute,
    permute_plan,
    pointwise,
    products,
    select_topk,
    softmax_topk,
    sparse_tiles,
    symmetric_products,
    topology,
)

BLOCK = sparse_tiles.BLOCK
T, K, D, F, E = 512, 2, 512, 1024, 2
R = T * K
TF32_CHIPS = (80, 90, 120)  # one for each way in which tensor cores are fed, the least shared memory among them


def kernel_names(capability: int) -> set[str]:
    """`module.function` of what is launched on such a chip; kernels in Gluon: see `test_hopper_products`."""
    modules = [module.name for module in pkgutil.iter_modules(foundry_moe_kernels.__path__)]
    names = set()
    for module in modules:
        if module.startswith("hopper") or (module.startswith("symmetric") and not has_tensor_maps(capability)):
            continue
        for name, kernel in inspect.getmembers(import_module(f"foundry_moe_kernels.{module}")):
            # interpreted or not: those that the module imports are another's
            if name.endswith("_kernel") and getattr(kernel, "fn", None) and kernel.fn.__module__.endswith(f".{module}"):
                names.add(f"{module}.{name}")
    return names


def has_tensor_maps(capability: int) -> bool:
    return descriptors.capability_supported((capability // 10, capability % 10))


def pretend(capability: int) -> None:
    """Shared memory and tiles are those of this chip."""
    limit = sparse_tiles.SHARED_BYTES[capability]
    sparse_tiles.shared_bytes = lambda device: limit
    sparse_tiles.capability = lambda device: capability


def tables() -> tuple[torch.Tensor, topology.Topology, torch.Tensor]:
    offsets_E = torch.tensor([T, R], dtype=torch.int32)
    return offsets_E, topology.topology_from_offsets(offsets_E, R, [F] * E, BLOCK), torch.zeros(R, dtype=torch.int32)


def launch_products(dtype: torch.dtype, **options: bool) -> None:
    """SDD, DSD and DDS with every transpose that a layer has; `tf32` is one of the options."""
    _, t, source_R = tables()
    x, h, w1, v1, w2 = (torch.zeros(*shape, dtype=dtype) for shape in ((R, D), (R, F), (E, F, D), (E, F, D), (E, D, F)))
    products.sdd_act(x, (w1, v1), t, "silu", source_R=source_R, choices=K, **options)
    products.sdd_act(x, (w1,), t, "gelu", source_R=source_R, choices=K, **options)
    products.dsd(h, w2, t, trans_b=True, **options)
    products.sdd(x, w2, t, **options)
    products.dsd((h, h.clone()), (w1, v1), t, **options)
    products.dsd(h, x, t, trans_s=True, stacked=True, **options)
    products.dsd(h, x, t, trans_s=True, stacked=True, out=w2.mT, **options)


def launch_mixed_widths(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    """A layer of experts of different widths, forwards and backwards."""
    _, _, source_R = tables()
    offsets_E = torch.arange(1, len(widths) + 1, dtype=torch.int32) * (R // len(widths))
    t = topology.topology_from_offsets(offsets_E, R, widths, BLOCK)
    x, dy, w1, v1, w2 = (torch.zeros(rows, D, dtype=dtype) for rows in (T, R, *[sum(widths)] * 3))
    z, h = products.sdd_act(x, (w1, v1), t, "silu", source_R=source_R, choices=K)
    products.dsd(h, w2, t)
    products.sdd(dy, w2, t, trans_b=True)
    pointwise.values_backward_(h, z, t, "silu", torch.zeros(T, K), source_R)
    products.dsd(h, dy, t, trans_s=True)
    products.dsd(tuple(z), (w1, v1), t)


def launch_block_sparse(dtype: torch.dtype, **options: bool) -> None:
    """A block-sparse matrix of any topology, every transpose: rows of 8 blocks, of which two make a tile, and of 4."""
    for wide in (8, 4):
        rows, columns = 2 * BLOCK, wide * BLOCK
        order = torch.arange(2 * wide, dtype=torch.int32)
        offsets = (torch.arange(3, dtype=torch.int32) * wide, torch.arange(wide + 1, dtype=torch.int32) * 2)
        index = block_products.BlockIndex(
            BLOCK, order // wide, order % wide, offsets[0], order, order // wide, offsets[1]
        )
        values = torch.zeros(2 * wide, BLOCK, BLOCK, dtype=dtype)
        for turned in (False, True):

            def new(*shape: int, turned: bool = turned) -> torch.Tensor:
                return torch.zeros(*shape[::-1], dtype=dtype).mT if turned else torch.zeros(*shape, dtype=dtype)

            block_products.sdd(new(rows, D), new(D, columns), index, **options)
            block_products.sdd(torch.zeros(rows, D, dtype=dtype), new(D, columns), index, **options)
            block_products.dsd(values, new(columns, D), index, **options)
            block_products.dsd(values, new(rows, D), index, transposed=True, **options)


def launch_experts(dtype: torch.dtype) -> None:
    """What is between the products."""
    offsets_E, _, source_R = tables()
    weights_TK, row_TK = torch.zeros(T, K), torch.zeros(T, K, dtype=torch.int32)
    x, z, h = (torch.zeros(*shape, dtype=dtype) for shape in ((R, D), (2, R, F), (R, F)))
    pointwise.activate(z, offsets_E, "silu")
    pointwise.activation_backward_(h, z, offsets_E, "silu", weights_TK, source_R)
    pairs, bias_EF = torch.zeros(1, R, 2 * F, dtype=dtype), torch.zeros(E, 2 * F, dtype=dtype)
    for order in ("concatenated", "interleaved"):
        pointwise.activate(pairs, offsets_E, "silu 1.702 7.0 1.0", pairs=order, bias_EF=bias_EF)
        pointwise.activation_backward_(
            h, pairs, offsets_E, "silu 1.702 7.0 1.0", weights_TK, source_R, pairs=order
        )  # fmt: skip
    topology.pack_rows(offsets_E, R)
    permute.permute(x[:T], row_TK, offsets_E)
    permute.unpermute(x, weights_TK, row_TK)
    permute.unpermute_backward(x[:T], x, weights_TK, row_TK, offsets_E)
    permute.gather_dots(torch.zeros(1, R), row_TK, torch.float32)
    mean.mean(*(torch.zeros(F, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(F))
    param, grad, first, square = (torch.zeros(F) for _ in range(4))
    for factor in (None, torch.ones(())):
        adamw.adamw(
            param, grad, (first, square), torch.ones(2), factor, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.0
        )
    stack, step = torch.zeros(E, D, F), torch.zeros(E, D, F, dtype=torch.bfloat16)
    for factor in (None, torch.ones(())):
        muon.momentum_(stack, stack.clone(), step, factor, 0.9, True)
    muon.subtract_(stack, step, 1.0, 0.1)
    bad = torch.zeros(1, dtype=torch.uint8)
    finite.nonfinite(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), bad, bad, dtype, R * D)


def launch_routing(experts: int = 128) -> None:
    """Gates and tables of rows, with as many experts as a program of the gate takes at once."""
    keys_T, mask_T = torch.zeros(T, dtype=torch.int32), torch.ones(T, dtype=torch.bool)
    x_TD, weight_ED = torch.zeros(T, D, dtype=torch.bfloat16), torch.zeros(experts, D)
    logits_TE = torch.zeros(T, experts)
    jitter = gate_logits.Jitter(keys_T=keys_T, amount=0.01, stream=1)
    for weight in (weight_ED, weight_ED.bfloat16()):
        gate_logits.gate_logits(x_TD, weight, jitter)
        gate_logits.gradients(logits_TE, x_TD, weight, jitter, (True, True))
    noise.uniform(keys_T, experts, 1)
    noise.jitter(x_TD, keys_T, 0.01, 1)
    for rule in (
        softmax_topk.Rule(K, normalize=True, with_balance=True),
        softmax_topk.Rule(K, stream=1, with_balance=True),
    ):
        weights_TK, experts_TK, wanted_TK, mean_E, counts_E, z, number, loss = softmax_topk.softmax_topk(
            logits_TE, rule, mask_T, keys_T
        )
        softmax_topk.softmax_topk_backward(
            logits_TE,
            rule,
            mask_T,
            softmax_topk.Chosen(experts_TK, wanted_TK, counts_E, number),
            softmax_topk.Gradients(weights_TK, mean_E, z, loss),
        )
    many_TE = torch.zeros(65536, experts)  # summed in a launch of its own
    softmax_topk.softmax_topk(many_TE, softmax_topk.Rule(K, with_balance=True), None, None)
    values_TK, experts_TK = select_topk.topk(logits_TE, K)
    select_topk.ranked(logits_TE[:, :16].contiguous(), 16, absent_below_zero=True)
    select_topk.spread(values_TK, experts_TK, experts)
    select_topk.keep_largest(logits_TE.t().contiguous(), 8)
    experts_TK = torch.zeros(T, K, dtype=torch.int64)
    permute_plan.count_choices(experts_TK, experts, mask_T)
    permute_plan.plan_permute(experts_TK, experts)
    counts_P2, counts_PN = dispatch_plan.count_rows(experts_TK, experts // 8, 8)
    for room in (None, (counts_P2, T)):
        dispatch_plan.assign_rows(experts_TK, torch.zeros(T, K), experts // 8, counts_P2, counts_PN, room=room)
    room_E, expert_T, bid_T = torch.ones(experts, dtype=torch.int32), torch.zeros(T, dtype=torch.int32), torch.zeros(T)
    price_E = assignment.ascend(logits_TE, expert_T, torch.zeros(experts), [1.0, 0.5])
    for final in (False, True):
        assignment.bid(logits_TE, price_E, room_E, expert_T, bid_T, most=torch.ones(()), epsilon=0.1, final=final)
    assignment.settle(expert_T, bid_T, room_E, price_E)


def launch_muon() -> None:
    """Products at the sizes of an expert's matrices."""
    x, g = (torch.zeros(2, 1024, columns, dtype=torch.float16) for columns in (2048, 1024))
    symmetric_products.symmetric_product(x)
    symmetric_products.symmetric_product(x.mT.contiguous(), turned=True)
    for added in ([], [g], [g, x[:, :, :1024].contiguous()]):
        symmetric_products.symmetric_product(g, g, added, scales=(1.0, 2.0, 3.0))


def launch_low_rank(dtype: torch.dtype) -> None:
    """Products of LoRA adapters of rank 16, of tokens and of rows."""
    offsets_E, _, source_R = tables()
    rows, weights_TK = expert_products.ragged_rows(offsets_E, R), torch.zeros(T, K)
    tokens = expert_products.Tokens(x_TD=torch.zeros(T, D, dtype=dtype), source_R=source_R, choices=K)
    low, wide, h, z = (torch.zeros(*shape, dtype=dtype) for shape in ((R, 16), (R, 32), (R, F), (2, R, F)))
    of_d, of_f = torch.zeros(E, D, 16), torch.zeros(E, F, 16)
    factors = low_rank.Factors(of_d, of_f, of_d, of_f, of_f, of_d)
    packed = low_rank.pack(factors, torch.zeros(E, D, F, dtype=dtype), 2, 2.0)
    low_rank.project(tokens, packed.up_a, rows)
    low_rank.project(h, packed.down_a, rows)
    low_rank.outer(tokens, low, rows, 16, weights_TK=weights_TK, factor_EKL=packed.down_b[0])
    low_rank.outer(tokens, wide, rows, 16, planes=2)
    low_rank.hidden_backward_(
        h, z, wide, low, packed.up_b, rows, 16, scale=2.0, activation="silu", weights_TK=weights_TK, source_R=source_R
    )


def launch_all(capability: int) -> None:
    pretend(capability)
    launch_products(torch.bfloat16)
    launch_block_sparse(torch.bfloat16)
    if capability in TF32_CHIPS:
        launch_products(torch.float32, tf32=True)
        launch_block_sparse(torch.float32, tf32=True)
    launch_experts(torch.bfloat16)
    launch_mixed_widths(torch.bfloat16, (F, F // 2))
    launch_low_rank(torch.bfloat16)
    launch_routing()
    if has_tensor_maps(capability):
        launch_muon()
