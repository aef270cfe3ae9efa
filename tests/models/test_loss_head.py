"""The loss without logits: equal to the cross-entropy of logits, in value and in all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM
from torch.nn import functional as F

from foundry_moe.models import loss_head
from foundry_moe.models.loss_head import linear_cross_entropy
from foundry_moe.models.mpt import DMoECausalLM
from tests.helpers.training import mpt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_liger = pytest.mark.skipif(
    DEVICE == "cpu" and triton.__version__.startswith("3.3."), reason="Triton 3.3 interprets no kernel of Liger's"
)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50, (2, 16), device=DEVICE)
    labels = ids.masked_fill(torch.rand(ids.shape, device=DEVICE) < 0.2, loss_head.IGNORED)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}


def train(model: DMoECausalLM, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    outputs = model(data)
    loss = model.loss(outputs, data)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, outputs.logits


@runs_liger
@pytest.mark.parametrize("ignored", ["some", "all"])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_loss_and_gradients_equal_cross_entropy(ignored: str, frozen: int | None) -> None:
    x, weight = (torch.randn(37, 16, device=DEVICE), torch.randn(101, 16, device=DEVICE))
    targets = torch.randint(0, 101, (37,), device=DEVICE)
    targets[3 if ignored == "some" else slice(None)] = loss_head.IGNORED
    results = []
    for function in (linear_cross_entropy, lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="sum")):
        leaves = [tensor.clone().requires_grad_(index != frozen) for index, tensor in enumerate((x, weight))]
        loss = function(*leaves, targets)
        (0.3 * loss).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)  # fp32


@runs_liger
@pytest.mark.parametrize("tied", [True, False])
def test_models_train_equally_and_evaluate_with_logits(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(loss_head, "runs_on", lambda device: True)
    data = batch()
    fused, plain = (
        mpt(tie_word_embeddings=tied, loss_fn=loss_fn).to(DEVICE)
        for loss_fn in ("fused_linear_crossentropy", "torch_crossentropy")
    )
    loss, gradients, logits = train(fused, data)
    true_loss, true_gradients, true_logits = train(plain, data)
    assert logits is None and true_logits is not None
    torch.testing.assert_close(loss, true_loss, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == true_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, true_gradients[name], rtol=1e-4, atol=1e-6)  # fp32, sums in another order
    fused.eval()
    assert fused(data).logits.shape == (2, 16, 50)


@pytest.mark.quick
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_loss_of_logits_is_llm_foundrys(share: float) -> None:
    model, data = mpt(loss_fn="torch_crossentropy").to(DEVICE), batch()
    data["labels"] = data["labels"].masked_fill(torch.rand(2, 16, device=DEVICE) < share, loss_head.IGNORED)
    outputs = model(data)
    assert torch.equal(model.loss(outputs, data), ComposerMPTCausalLM.loss(model, outputs, data))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [({"use_train_metrics": True}, "use_train_metrics"), ({"logit_scale": 0.5}, "logit_scale")],
)
def test_models_that_need_logits_keep_them(keys: dict[str, Any], sentence: str) -> None:
    assert not mpt(**keys).fuses_loss
    with pytest.raises(ValueError, match=rf"model.loss_fn \(fused_linear_crossentropy\).*{sentence}"):
        mpt(loss_fn="fused_linear_crossentropy", **keys)


@pytest.mark.quick
def test_without_liger_kernel_the_loss_reads_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "is_installed", lambda: False)
    assert not mpt().fuses_loss
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        mpt(loss_fn="fused_linear_crossentropy")


@pytest.mark.gpu
def test_peak_memory_is_below_the_logits() -> None:
    x = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(65536, 512, device="cuda", requires_grad=True)
    targets = torch.randint(0, 65536, (8192,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets)
    loss.backward()
    logits_bytes = 2 * 8192 * 65536  # in bf16; the plain loss holds them in fp32 as well
    assert torch.cuda.max_memory_allocated() - before < 0.6 * logits_bytes
    truth = F.cross_entropy(x.detach().float() @ weight.detach().float().T, targets, reduction="sum")
    torch.testing.assert_close(loss.detach(), truth, rtol=1e-3, atol=0.0)  # operands rounded to bf16
