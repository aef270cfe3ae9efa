"""Builds gates and contexts for the tests of this folder."""

import torch

from foundry_moe.layers.context import BatchContext, GateContext
from foundry_moe.layers.gates.gate import Gate
from foundry_moe.layers.gates.registry import build_gate
from foundry_moe.layers.schedule import Progress

WIDTH = 6
EVERY_LOSS = frozenset({"balance", "z", "importance", "load", "alignment"})
# name and keys of each gate with a choice of experts that its top_k goes with
GATES = [
    ({"name": "switch"}, 1),
    ({"name": "gshard"}, 2),
    ({"name": "topk"}, 3),
    ({"name": "topk", "noise": True, "score": "sigmoid", "bias_balance": True, "groups": 4, "group_limit": 2}, 3),
    ({"name": "ktop1"}, 2),
    ({"name": "hierarchical", "groups": 2}, 3),
    ({"name": "base"}, 1),
    ({"name": "hash"}, 1),
    ({"name": "hash", "table": "bigram"}, 1),
    ({"name": "dense_to_sparse", "threshold": 0.05}, 1),
    ({"name": "expert_choice"}, 2),
]
GATE_IDS = ["-".join(str(v) for v in gate.values())[:40] for gate, _ in GATES]


def build(settings, top_k, experts=8, dtype=torch.float64, seed=3, layer=1, std=0.7) -> Gate:
    gate = build_gate(settings, d_model=WIDTH, num_experts=experts, top_k=top_k, dtype=dtype)
    gate.reset_parameters(seed=seed, layer=layer, std=std)
    return gate


def batch(sequences=4, positions=8, vocabulary=30, seed=0, dtype=torch.float64):
    """Token ids and the inputs that belong to them: tokens with the same id have the same input."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(vocabulary, (sequences, positions), generator=generator)
    table_VD = torch.randn(vocabulary, WIDTH, generator=generator, dtype=dtype)
    return ids_BS, table_VD[ids_BS].reshape(-1, WIDTH)


def context_of(
    ids_BS,
    mask_BS=None,
    losses=EVERY_LOSS,
    training=True,
    step=0,
    layer=1,
    balance_over="rank",
    packed_BS=None,
    **fields,
) -> GateContext:
    context = BatchContext()
    context.progress = Progress(ba=step, dur=0.0)
    for name, value in fields.items():
        setattr(context, name, value)
    context.set_tokens(ids_BS, mask_BS, packed_BS)
    return context.for_tokens(
        ids_BS.numel(), layer=layer, seed=5, losses=losses, training=training, balance_over=balance_over
    )
