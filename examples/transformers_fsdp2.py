"""FSDP2 through Accelerate on a mixture-of-experts model whose experts run on foundry_moe, without Composer.

pip install '.[transformers]' accelerate
torchrun --nproc-per-node 2 examples/transformers_fsdp2.py [FOLDER] [--experts foundry_moe | grouped_mm | eager]
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe.integrations.transformers import register

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", nargs="?", default=tempfile.gettempdir() + "/transformers_fsdp2")
parser.add_argument("--experts", default="foundry_moe")
args = parser.parse_args()

register()  # before a model names "foundry_moe"
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
    transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
)  # fmt: skip
accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
if accelerator.device.type == "cpu":  # Accelerate ignores the plugin there, without a message
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin

torch.manual_seed(0)
config = AutoConfig.for_model(
    "qwen3_moe", vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, experts_implementation=args.experts, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = accelerator.prepare(model, optimizer)
assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "parameters are not sharded"

text = torch.tensor(list(Path(__file__).read_bytes())).to(accelerator.device)  # of this program, byte by byte
batches = text[: len(text) // 64 * 64].view(-1, 2, 32)
rank, world = accelerator.process_index, accelerator.num_processes
for step in range(1, 21):
    ids = batches[(step * world + rank) % len(batches)]
    loss = model(ids, labels=ids, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    if accelerator.is_main_process:
        print(f"step {step} loss {mean:.6f}")

# names and layouts are the model's own: whole tensors on the main process
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    args.folder, state_dict=state, is_main_process=accelerator.is_main_process
)
model.eval()
with torch.no_grad():
    logits = model(batches[0], use_cache=False).logits
    if accelerator.is_main_process:
        loaded = AutoModelForCausalLM.from_pretrained(args.folder, experts_implementation=args.experts)
        loaded = loaded.to(accelerator.device).eval()
        print("reloaded model is equal:", torch.equal(logits, loaded(batches[0], use_cache=False).logits))

accelerator.end_training()
time.sleep(1)  # gloo's threads free their tensors: in torch 2.11 a Python that exits meanwhile aborts the process
