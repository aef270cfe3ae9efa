"""Hugging Face models with dMoE layers, without a trainer or a hub: python examples/convert_hugging_face.py

A dense Llama is upcycled: its experts are copies of the dense FFN, so at first it computes the same. The MoE blocks of
a Mixtral are taken over with their weights. Then the Llama is trained for a few steps, and its experts come to differ.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from foundry_moe import MoEConfig, apply_dmoe

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def logits_before_and_after(model: PreTrainedModel, config: MoEConfig, ids: torch.Tensor) -> float:
    """Converts the model in place; returns the largest difference of its logits."""
    with torch.no_grad():
        before = model(input_ids=ids).logits
        layers = apply_dmoe(model, config)
        after = model(input_ids=ids).logits
    print(f"{type(model).__name__}: {len(layers)} layers of {config.num_experts} experts, top-{config.top_k}")
    return (after - before).abs().max().item()


def main() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (4, 32))

    llama = LlamaForCausalLM(LlamaConfig(**SHAPE))
    difference = logits_before_and_after(llama, MoEConfig(num_experts=4, top_k=2, init="upcycle"), ids)
    print(f"  upcycled, largest difference of logits: {difference:.1e}")

    mixtral = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))
    difference = logits_before_and_after(mixtral, MoEConfig(num_experts=4, top_k=2), ids)
    print(f"  taken over, largest difference of logits: {difference:.1e}")

    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    for _ in range(10):
        loss = llama(input_ids=ids, labels=ids).loss  # the balance loss enters the gradient inside the layers
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    w1_EFD = next(weight for name, weight in llama.named_parameters() if name.endswith("experts.w1_EFD"))
    difference = (w1_EFD[0] - w1_EFD[1]).abs().max().item()
    print(f"after 10 steps: loss {loss.item():.2f}, experts 0 and 1 differ by {difference:.1e}")


if __name__ == "__main__":
    main()
