"""A dense FFN as experts: copies of it, or of shards of it (granular upcycling), scaled so that they add up to it.

Komatsuzaki et al. 2022 (Sparse Upcycling); He et al. 2024 (Upcycling Large Language Models into Mixture of Experts,
arXiv 2410.07524), section 4: with experts of 1/G of the width, expert i holds shard i mod G, the rows of the gate
are equal within each virtual group of G experts, so that a token's top k are whole groups, and the weights are scaled
by what the gate's weights leave out. There the scale's cube root goes to each matrix of a GLU. Here its square root
goes to each of those that act linearly on the output, up and down (of an MLP: all of it to down), since then a model
whose weights add up to one computes what the dense one did, exactly.

Shapes: E experts, D model width, F width of the dense block, f expert width, G = F / f shards.
"""

from __future__ import annotations

import math

from foundry_moe.config import MoEConfig
from foundry_moe.models.families import WeightPart
from foundry_moe.models.ffn import DenseFFN

# the mean of sigmoid(x w) while w is small
_UNTRAINED_SIGMOID = 0.5


def check_upcycle(name: str, block: DenseFFN, config: MoEConfig) -> int:
    """Returns G, how many shards the block is cut into.

    Args:
        config: with `expert_hidden_size` and `activation` resolved.

    Raises:
        ValueError: a width, number, gate, activation or bias that experts made of this block cannot have.
    """
    width, dense = config.expert_hidden_size, block.hidden_size
    if isinstance(width, tuple):
        raise ValueError(
            f"expert_hidden_size ({list(width)}): experts that are made of {name} have one width; leave it auto, or "
            "use init: random"
        )
    assert isinstance(width, int)
    if config.activation != block.activation:
        raise ValueError(
            f"activation ({config.activation}) must be that of {name} ({block.activation}) for init: upcycle; "
            "leave it auto"
        )
    if dense % width:
        raise ValueError(
            f"expert_hidden_size ({width}) must be that of {name} ({dense}) or a fraction of it for init: upcycle; "
            "leave it auto"
        )
    if block.biases and config.bias is False:
        raise ValueError(f"bias (false): {name} has biases, which init: upcycle copies; leave bias out, or write true")
    shards = dense // width
    if shards == 1:
        return 1
    for key, value in (("num_experts", config.num_experts), ("top_k", config.top_k)):
        if value % shards:
            raise ValueError(
                f"{key} ({value}) must be a multiple of {shards} for init: upcycle, since {name} ({dense} wide) is "
                f"cut into {shards} experts of {width}"
            )
    if config.gate["name"] != "topk":
        raise ValueError(
            f"gate.name ({config.gate['name']}): init: upcycle with experts of 1/{shards} of the width needs topk"
        )
    return shards


def weight_scale(config: MoEConfig, shards: int) -> float:
    """The factor that makes the weighted sum of a token's experts equal to the dense block's output.

    Exact if the combine weights add up to one; otherwise for an untrained gate, as in He et al. 2024.
    """
    gate = config.gate
    scale = float(gate.get("scale", 1.0))
    if gate["name"] == "switch":
        return float(config.num_experts)
    if gate["name"] != "topk":
        return 1.0
    if gate.get("normalize", True):
        total = scale
    elif gate.get("score", "softmax") == "sigmoid":
        total = scale * config.top_k * _UNTRAINED_SIGMOID
    else:
        total = scale * config.top_k / config.num_experts
    return shards / total


def upcycled_parts(block: DenseFFN, config: MoEConfig, shards: int) -> list[WeightPart]:
    """The parts of the experts' tensors, in terms of the block's tensors."""
    d_model, dense, width = block.d_model, block.hidden_size, block.hidden_size // shards
    total = weight_scale(config, shards)
    gated = "v1" in block.names
    scale = {"w1": 1.0, "v1": math.sqrt(total), "w2": math.sqrt(total) if gated else total}
    parts = []
    for expert in range(config.num_experts):
        row = expert % shards * width
        for role, theirs in block.names.items():
            down = role == "w2"
            whole, shape, begin = ((d_model, dense), (d_model, width), (0, row)) if down else (
                (dense, d_model), (width, d_model), (row, 0))  # fmt: skip
            parts.append(
                WeightPart(
                    ours=f"experts.{role}_{'EDF' if down else 'EFD'}",
                    expert=expert,
                    shape=shape,
                    theirs=f"{theirs}.weight",
                    their_shape=whole[::-1] if block.transposed else whole,
                    begin=begin[::-1] if block.transposed else begin,
                    transposed=block.transposed,
                    scale=scale[role],
                )
            )
            if role in block.biases:
                parts.append(
                    WeightPart(
                        ours=f"experts.{role}_bias_{'ED' if down else 'EF'}",
                        expert=expert,
                        shape=shape[:1],
                        theirs=f"{theirs}.bias",
                        their_shape=whole[:1],
                        begin=(0,) if down else (row,),
                        # every expert of a token adds it, so each shard has its share
                        scale=total / shards if down else scale[role],
                    )
                )
    return parts
