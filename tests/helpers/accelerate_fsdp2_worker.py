"""One of two processes of FSDP2 through Accelerate on a CPU; rank 0 prints the losses of some steps.

usage: torchrun --nproc-per-node 2 -m tests.helpers.accelerate_fsdp2_worker IMPLEMENTATION STEPS
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import fsdp2_prepare_model
from torch.distributed.tensor import DTensor

from foundry_moe.integrations.transformers import register
from tests.helpers.transformers_models import VOCABULARY, tiny_model


def main(implementation: str, steps: int) -> None:
    register()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Accelerate ignores the plugin on a CPU, without a word
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    model = fsdp2_prepare_model(accelerator, model)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, DTensor), "not sharded"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + accelerator.process_index)
    found = []
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 16), generator=generator)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    if accelerator.is_main_process:
        print("losses", *(f"{loss:.6f}" for loss in found))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
