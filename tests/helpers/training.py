"""Small models, and a run of Composer's Trainer on them in this process."""

from __future__ import annotations

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from foundry_moe.models.mpt import DMoECausalLM

MOE = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 24, "loss": {"balance": 0.5, "z": 0.1}}
MPT = {
    "d_model": 32,
    "n_heads": 2,
    "n_layers": 2,
    "max_seq_len": 16,
    "vocab_size": 50,
    "no_bias": True,
    "use_train_metrics": False,
}


def batches(number: int = 8, size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 50, (number * size, 16), generator=generator)
    samples = [{"input_ids": row, "labels": row, "attention_mask": torch.ones(16, dtype=torch.bool)} for row in ids]
    return DataLoader(samples, batch_size=size)  # type: ignore[arg-type]


def llama() -> HuggingFaceModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    return HuggingFaceModel(LlamaForCausalLM(config), use_logits=True, shift_labels=True)


def mpt(**keys) -> DMoECausalLM:
    torch.manual_seed(3)
    return DMoECausalLM(**{**MPT, "moe": MOE, **keys})


def fit(model, *, algorithms=(), microbatch=4, duration="3ba", callbacks=(), optimizer=None, **keys) -> Trainer:
    trainer = Trainer(
        model=model,
        optimizers=optimizer or torch.optim.SGD(model.parameters(), lr=0.05),
        train_dataloader=keys.pop("train_dataloader", None) or batches(),
        max_duration=duration,
        device="cpu",
        device_train_microbatch_size=microbatch,
        algorithms=list(algorithms),
        callbacks=list(callbacks),
        progress_bar=False,
        log_to_console=False,
        seed=1,
        **keys,
    )
    trainer.fit()
    return trainer
