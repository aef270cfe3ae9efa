"""Trains a small random Qwen3-MoE with Hugging Face's Trainer and foundry_moe's experts.

    pip install '.[transformers]' accelerate
    python examples/hf_trainer.py [--experts eager] [--steps 20] [--out FOLDER]
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 examples/hf_trainer.py

For a model of yours the two lines that matter are `register()` and `experts_implementation=`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from foundry_moe.integrations.transformers import register

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", default="foundry_moe")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/hf_trainer")
    asked = parser.parse_args()
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=asked.experts, dtype=torch.float32)
    tokens = torch.randint(64, (asked.steps * 4, 16))
    settings = TrainingArguments(
        output_dir=asked.out, max_steps=asked.steps, per_device_train_batch_size=4, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    print("losses", *(f"{line['loss']:.6f}" for line in trainer.state.log_history if "loss" in line))
    trainer.save_model()


if __name__ == "__main__":
    main()
