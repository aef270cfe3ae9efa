"""GRPO with router replay on a CPU: the update uses the experts that chose during generation.

python examples/router_replay.py

The policy writes one token after a prompt of one; its reward is 1 for the prompt's successor. Each batch of samples is
used for two updates, the second with weights that are not those that sampled.
"""

import torch
from torch import Tensor, nn

from foundry_moe import BatchContext, MoEConfig, MoELayer, record_choices, replay_choices

VOCABULARY, WIDTH, LAYERS, PROMPTS, GROUP, CLIP = 16, 32, 2, 16, 16, 0.2
MOE = MoEConfig(num_experts=8, top_k=2, expert_hidden_size=32, activation="swiglu", loss={})


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        context = BatchContext()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(
            MoELayer(WIDTH, MOE, layer_index=i, num_layers=LAYERS, context=context) for i in range(LAYERS)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).log_softmax(-1)


def step(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """One generation and two updates; the mean reward, and the share of choices that would have differed."""
    prompts_BS = torch.arange(PROMPTS).repeat_interleave(GROUP)[:, None]
    with torch.no_grad(), record_choices(policy) as choices:  # a serving engine returns the same tensor
        sampled = policy(prompts_BS)[:, -1]
        answers_B1 = sampled.exp().multinomial(1)
    rewards_B = (answers_B1 == (prompts_BS + 1) % VOCABULARY).squeeze(1).float()
    groups = rewards_B.view(PROMPTS, GROUP)
    advantages_B = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    before_B = sampled.gather(1, answers_B1).squeeze(1)
    for _ in range(2):
        with replay_choices(policy, choices.experts_TLK):
            now_B = policy(prompts_BS)[:, -1].gather(1, answers_B1).squeeze(1)
        ratio_B = (now_B - before_B).exp()
        loss = -torch.min(ratio_B * advantages_B, ratio_B.clamp(1 - CLIP, 1 + CLIP) * advantages_B).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad(), record_choices(policy) as own:
        policy(prompts_BS)
    return rewards_B.mean().item(), (own.experts_TLK != choices.experts_TLK).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.004)
    for number in range(30):
        reward, differ = step(policy, optimizer)
        print(f"step {number}: reward {reward:.3f}, {differ:.1%} of choices would differ without replay")
