"""Every gate in a whole layer, on the block-sparse kernels beside the reference: outputs, losses, every gradient."""

import pytest
import torch

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from tests.helpers.gates import GATE_IDS, GATES

pytestmark = pytest.mark.filterwarnings("ignore:gate expert_choice")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 16  # rows of 64 bytes: tensor maps want multiples of 16


def outcome(settings, top_k, backend, dtype):
    """y, and the gradients of the input and of every parameter, the balance loss in the graph."""
    config = MoEConfig(
        num_experts=8, top_k=top_k, expert_hidden_size=32, activation="swiglu", gate=settings, backend=backend
    )
    context = BatchContext()
    context.progress = Progress(ba=1, dur=0.0)
    layer = MoELayer(WIDTH, config, layer_index=1, num_layers=2, context=context, dtype=torch.float64)
    layer.reset_parameters()
    layer.to(device=DEVICE, dtype=dtype).train()
    generator = torch.Generator().manual_seed(2)
    ids_BS = torch.randint(30, (2, 20), generator=generator)
    context.set_tokens(ids_BS.to(DEVICE), None)
    table_VD = torch.randn(30, WIDTH, generator=generator, dtype=torch.float64)
    x = table_VD[ids_BS].to(device=DEVICE, dtype=dtype).requires_grad_()
    y = layer(x)
    direction = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(device=DEVICE, dtype=dtype)
    context.track_scale((y * direction).sum()).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize(("settings", "top_k"), GATES, ids=GATE_IDS)
def test_a_layer_is_the_same_on_kernels_and_on_the_reference(settings, top_k):
    ours = outcome(settings, top_k, "blocksparse", torch.float32)
    truth = outcome(settings, top_k, "reference", torch.float64)
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        if value is None:
            assert ours[name] is None, name
            continue
        assert torch.isfinite(ours[name]).all(), name
        # fp32 beside fp64
        error = (ours[name].double() - value).norm() / value.norm().clamp(min=1e-9)
        assert error < 1e-4, f"{name}: {error:.1e}"
