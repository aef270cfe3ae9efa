"""Experts in a model under Composer's Trainer, on the bytes of the licence.

python examples/composer_script.py
composer -n 2 examples/composer_script.py      # experts divided over two processes, FSDP2 for the rest
"""

import math
from pathlib import Path

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.utils import FSDP2Config, dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from foundry_moe import DMoE, ExpertLoad

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

dist.initialize_dist("gpu" if torch.cuda.is_available() else "cpu")
several = dist.get_world_size() > 1
torch.manual_seed(0)
text = torch.tensor(list((Path(__file__).parents[1] / "LICENSE").read_bytes()))
rows = text[: len(text) // 64 * 64].view(-1, 64)
samples = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]
model = HuggingFaceModel(LlamaForCausalLM(LlamaConfig(vocab_size=256, **SHAPE)), use_logits=True, shift_labels=True)
load = ExpertLoad("5ba")
trainer = Trainer(
    model=model,
    algorithms=[DMoE(num_experts=8, top_k=2, expert_hidden_size=64, loss={"balance": 0.01}, mesh={"expert": "auto"})],
    callbacks=[load],
    train_dataloader=DataLoader(
        samples, batch_size=8 // dist.get_world_size(), sampler=dist.get_sampler(samples, shuffle=True)
    ),
    optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
    parallelism_config={"fsdp": FSDP2Config()} if several else None,
    max_duration="80ba",
    progress_bar=False,
    seed=0,
)
trainer.fit()
print(f"loss {trainer.state.loss.item():.2f}; all 256 bytes alike: {math.log(256):.2f}")
shares = load.latest_LE.sum(0) / load.latest_LE.sum()
print("share of tokens by expert:", " ".join(f"{share:.2f}" for share in shares.tolist()))
