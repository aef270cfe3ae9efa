"""Hugging Face's Trainer on a mixture-of-experts model whose experts run on foundry_moe, without Composer.

pip install '.[transformers]' accelerate
python examples/transformers_trainer.py [FOLDER] [--experts foundry_moe | grouped_mm | eager]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from foundry_moe.integrations.transformers import register

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", nargs="?", default=tempfile.gettempdir() + "/transformers_trainer")
parser.add_argument("--experts", default="foundry_moe")
args = parser.parse_args()

register()  # before a model names "foundry_moe"
torch.manual_seed(0)
config = AutoConfig.for_model(
    "qwen3_moe", vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, experts_implementation=args.experts, dtype=torch.float32)

text = torch.tensor(list(Path(__file__).read_bytes()))  # of this program, byte by byte
samples = [{"input_ids": part, "labels": part} for part in text[: len(text) // 32 * 32].view(-1, 32)]
arguments = TrainingArguments(
    args.folder, max_steps=20, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1, report_to=[],
    save_strategy="no", gradient_checkpointing=True, disable_tqdm=True, log_level="error", seed=0,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=samples)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']} loss {entry['loss']}")

trainer.save_model()  # names and layouts are the model's own; the choice of experts is not saved
reloaded = AutoModelForCausalLM.from_pretrained(args.folder, experts_implementation=args.experts).to(model.device)
batch = samples[0]["input_ids"][None].to(model.device)
model.eval()
print("reloaded model is equal:", torch.equal(model(batch).logits, reloaded.eval()(batch).logits))
