"""TRL's SFTTrainer on a mixture-of-experts model whose experts run on foundry_moe, without Composer.

pip install '.[transformers]' trl
python examples/transformers_sft.py [FOLDER] [--experts foundry_moe | grouped_mm | eager]
"""

import argparse
import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from foundry_moe.integrations.transformers import register

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", nargs="?", default=tempfile.gettempdir() + "/transformers_sft")
parser.add_argument("--experts", default="foundry_moe")
args = parser.parse_args()

# A tiny random model in a folder, in place of one from the hub
torch.manual_seed(0)
vocabulary = {character: i for i, character in enumerate(["<pad>", "<eos>", *string.printable])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(args.folder)
config = AutoConfig.for_model(
    "mixtral", vocab_size=len(vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, pad_token_id=0,
    bos_token_id=None, eos_token_id=1,
)  # fmt: skip
AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(args.folder)

register()  # before a model names "foundry_moe"
questions = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(10) for b in range(8)]
arguments = SFTConfig(
    args.folder + "/run", model_init_kwargs={"experts_implementation": args.experts, "dtype": "float32"},
    max_steps=20, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, report_to=[], bf16=False,
    save_strategy="no", disable_tqdm=True, log_level="error", seed=0,
)  # fmt: skip
trainer = SFTTrainer(model=args.folder, args=arguments, train_dataset=Dataset.from_list(questions))
assert trainer.model.config._experts_implementation == args.experts
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']} loss {entry['loss']}")
