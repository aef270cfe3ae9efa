"""Fine-tunes a mixture-of-experts model with TRL's SFTTrainer and foundry_moe's experts.

    pip install '.[transformers]' trl
    python examples/trl_sft.py MODEL [--experts eager] [--steps 20] [--out FOLDER]

MODEL: a name or folder of a model with its tokenizer. The text is this file's: put your dataset in its place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from foundry_moe.integrations.transformers import register


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--experts", default="foundry_moe")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trl_sft")
    asked = parser.parse_args()
    register()
    lines = [line for line in Path(__file__).read_text().splitlines() if line.strip()]
    settings = SFTConfig(
        output_dir=asked.out, max_steps=asked.steps, per_device_train_batch_size=4, learning_rate=1e-3, max_length=64,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
        model_init_kwargs={"experts_implementation": asked.experts, "dtype": "float32"},
    )  # fmt: skip
    trainer = SFTTrainer(model=asked.model, args=settings, train_dataset=Dataset.from_dict({"text": lines}))
    trainer.train()
    print("losses", *(f"{line['loss']:.6f}" for line in trainer.state.log_history if "loss" in line))


if __name__ == "__main__":
    main()
