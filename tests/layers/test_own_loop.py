"""Layers in a training loop of one's own: what it has to set, and what is refused without."""

import pytest
import torch
from torch import nn

from foundry_moe import BatchContext, MoEConfig, MoELayer, Progress, step_gates_after
from foundry_moe.parallel.collectives import GateCollectives
from tests.helpers.fake_ranks import fake_ranks

pytestmark = pytest.mark.quick
WIDTH = 8


class Model(nn.Module):
    """A layer whose output is the logits of its input's ids, and their loss with labels."""

    def __init__(self, gate={"name": "topk"}, top_k=2, **keys):  # noqa: B006
        super().__init__()
        torch.manual_seed(2)
        config = MoEConfig(
            num_experts=4, top_k=top_k, gate=gate, expert_hidden_size=6, activation="swiglu", init_std=0.5, **keys
        )
        self.context = BatchContext()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.ffn = MoELayer(WIDTH, config, context=self.context)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.ffn(self.embed(input_ids))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def batch(seed=0):
    return torch.randint(WIDTH, (2, 12), generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.fixture
def two_ranks():
    with fake_ranks(2):
        yield


@pytest.mark.parametrize(
    ("gate", "top_k"),
    [
        ({"name": "gshard"}, 2),
        ({"name": "switch", "jitter": 0.3}, 1),
        ({"name": "topk", "noise": True}, 2),
        ({"name": "dense_to_sparse", "temperature": 1.0}, 1),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_random_numbers_of_a_gate_need_the_progress_with_which_they_change(gate, top_k):
    model = Model(gate, top_k, loss={})
    model.context.observe(model)
    with pytest.raises(ValueError, match=r"random numbers follow the training's progress, which nothing sets"):
        model(batch())
    outputs = []
    for step in range(2):
        model.context.progress = Progress(ba=step)
        outputs.append(model(batch())["logits"])
    assert not torch.equal(*outputs)
    model.context.progress = None
    model.eval()(batch())


def test_the_scale_of_auxiliary_losses_holds_where_no_pass_is_observed():
    model = Model(loss={"balance": 0.5})
    found = []
    for scale in (None, 0.0, 2.0):
        model.context.auxiliary_scale = None if scale is None else torch.tensor(scale)
        model.zero_grad()
        model(batch())["logits"].square().mean().backward()
        found.append(gradients(model))
    torch.testing.assert_close(found[2] - found[1], 2 * (found[0] - found[1]))
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_model_that_is_compiled_as_a_whole_scales_auxiliary_losses_by_its_loss(factor):
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = Model(loss={"balance": 0.5, "z": 0.1})
        model.context.observe(model)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        (call(batch(), labels=batch(1))["loss"] * factor).backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found)


def test_a_mask_of_another_shape_than_the_ids_is_refused_where_training_depends_on_it():
    model = Model(capacity=1.0)
    model.context.observe(model)
    with pytest.raises(ValueError, match=r"mask \[2, 11\] must have the shape of the token ids, \[2, 12\]"):
        model(batch(), attention_mask=torch.ones(2, 11))
    with torch.no_grad():  # as cached decoding, whose mask has the tokens before
        model(batch(), attention_mask=torch.ones(2, 11))
    model.eval()(batch(), attention_mask=torch.ones(2, 11))


def test_microbatches_of_a_balance_over_the_batch_need_its_loads_first():
    model = Model(balance_over="batch", loss={"balance": 0.5})
    context, ids = model.context, batch()
    context.observe(model)

    def train(parts):
        model.zero_grad()
        for part in parts:
            (context.track_scale(model(part)["logits"].square().mean()) / len(parts)).backward()
        return gradients(model)

    context.progress = Progress(ba=0)
    whole = train([ids])
    context.progress = Progress(ba=1)
    with pytest.warns(UserWarning, match=r"balance_over \(batch\): a layer is called more than once .*count_ahead"):
        assert not torch.allclose(train(ids.split(1)), whole)
    context.progress = Progress(ba=2)
    context.count_ahead(lambda: [model(part) for part in ids.split(1)])
    torch.testing.assert_close(train(ids.split(1)), whole)


@pytest.mark.parametrize("balance_over", ["microbatch", "batch"])
def test_a_balance_over_ranks_that_nothing_connects_is_refused(balance_over, two_ranks):
    model = Model(balance_over=balance_over, loss={"balance": 0.5})
    with pytest.raises(ValueError, match=rf"balance_over \({balance_over}\) needs sums over the 2 ranks .*parallelize"):
        model(batch())
    model.eval()(batch())
    GateCollectives().connect(model.context)
    model.train()(batch())


@pytest.mark.parametrize("keys", [{"balance_over": "sequence", "loss": {"balance": 0.5}}, {"loss": {"z": 0.1}}])
def test_losses_that_are_not_summed_over_ranks_need_no_connection(keys, two_ranks):
    Model(**keys)(batch())


def test_a_bias_that_no_rank_sums_the_loads_of_is_refused(two_ranks):
    model = Model({"name": "topk", "bias_balance": True}, loss={})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_gates_after(optimizer, model)
    model(batch())["logits"].sum().backward()
    with pytest.raises(ValueError, match="gate topk needs sums over the 2 ranks"):
        optimizer.step()
    GateCollectives().connect(model.context)
    optimizer.step()
