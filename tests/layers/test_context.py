"""What reaches the layers from the batch and from the trainer, with the model's code as it is."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.forward_pass import read_mask

pytestmark = pytest.mark.quick


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, input_ids, attention_mask=None):
        return self.embed(input_ids)


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        return self.model(batch["input_ids"], attention_mask=batch.get("attention_mask"))


def test_ids_and_padding_are_read_through_a_wrapper():
    context, model = BatchContext(), Wrapper()
    context.observe(model)
    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    seen = []
    model.model.embed.register_forward_hook(lambda *_: seen.append(context.for_tokens(6)))
    model({"input_ids": ids, "attention_mask": mask})
    model({"input_ids": ids})
    assert torch.equal(seen[0].token_ids_BS, ids) and torch.equal(seen[0].mask_T, mask.flatten().bool())
    assert seen[1].mask_T is None
    assert context.for_tokens(6).token_ids_BS is None  # none outside of a pass


def test_a_note_is_for_one_call_of_the_model_and_outer_modules_complete_inner_ones():
    context, model = BatchContext(), Wrapper()
    context.observe(model)
    context.observe(model)  # once is enough
    seen = []
    model.model.embed.register_forward_hook(lambda *_: seen.append(context.for_tokens(6)))
    ids, packed = torch.arange(6).view(2, 3), torch.tensor([[0, 0, 1], [0, 1, -1]])
    context.set_tokens(None, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    model({"input_ids": ids, "sequence_id": packed})
    model({"input_ids": ids})
    assert seen[0].mask_T.sum() == 5 and torch.equal(seen[0].token_ids_BS, ids)
    assert len(seen) == 2 and seen[1].mask_T is None


def test_what_a_note_leaves_out_is_that_of_the_arguments():
    context, model = BatchContext(), Model()
    context.observe(model)
    seen = []
    model.embed.register_forward_hook(lambda *_: seen.append(context.for_tokens(6)))
    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    context.set_tokens(ids + 1)
    model(ids, attention_mask=mask)
    context.set_tokens(None, torch.ones(2, 3))
    model(ids, attention_mask=mask)
    assert torch.equal(seen[0].token_ids_BS, ids + 1) and torch.equal(seen[0].mask_T, mask.flatten().bool())
    assert torch.equal(seen[1].token_ids_BS, ids) and seen[1].mask_T.all()


def test_other_ids_have_no_padding_of_the_pass_around():
    class Draft(Model):
        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids + 1)

    context, model = BatchContext(), Draft()
    model.inner = Model()
    context.observe(model)
    seen = []
    model.inner.embed.register_forward_hook(lambda *_: seen.append(context.for_tokens(6)))
    model(torch.arange(6).view(2, 3), attention_mask=torch.zeros(2, 3))
    assert seen[0].mask_T is None and seen[0].token_ids_BS[0, 0] == 1


@pytest.mark.parametrize("positions", [1, 3])
def test_one_mask_of_four_dimensions_holds_for_all_sequences_and_any_head_counts(positions):
    ids_BS = torch.zeros(2, positions, dtype=torch.long)
    mask = torch.ones(1, 2, positions, positions, dtype=torch.bool).tril()
    mask[:, 0] = False
    found = read_mask(mask, ids_BS)["mask_BS"]
    assert found.shape == (2, positions) and found.all()


def test_a_backward_pass_that_fails_leaves_nothing_to_the_next():
    context, model = BatchContext(), Model()
    context.observe(model)
    handle = model.embed.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (3 * context.track_scale(model(torch.arange(6).view(2, 3)).sum())).backward()
    handle.remove()
    for _ in range(2):
        context.track_scale(model(torch.arange(6).view(2, 3)).sum()).backward()
        assert context.for_tokens(6).token_ids_BS is None
        assert context.loss_scale(torch.device("cpu")) == 1


def test_ids_of_another_length_are_left_out():
    context, model = BatchContext(), Model()
    context.observe(model)
    model(torch.zeros(2, 3, dtype=torch.long))
    assert context.for_tokens(2).token_ids_BS is None


def sequences_of(context, tokens, **shape):
    return context.for_tokens(tokens, balance_over="sequence", losses=frozenset({"balance"}), training=True, **shape)


def test_sequences_are_rows_or_the_documents_packed_into_them():
    context = BatchContext()
    context.set_tokens(torch.zeros(2, 3, dtype=torch.long))
    assert sequences_of(context, 6).sequences.index_T.tolist() == [0, 0, 0, 1, 1, 1]
    context.set_tokens(torch.zeros(2, 3, dtype=torch.long), None, torch.tensor([[0, 0, 1], [0, 1, -1]]))
    noted = sequences_of(context, 6).sequences
    assert noted.index_T.tolist() == [0, 0, 1, 3, 4, 3] and noted.num_sequences == 6
    assert context.for_tokens(6, balance_over="sequence", losses=frozenset({"z"}), training=True).sequences is None
    without = BatchContext()
    assert sequences_of(without, 6, rows=3).sequences.index_T.tolist() == [0, 0, 1, 1, 2, 2]
    assert sequences_of(without, 0, rows=0).sequences.num_sequences == 0
    with pytest.raises(ValueError, match=r"balance_over \(sequence\): a layer got 5 tokens without their sequences"):
        sequences_of(without, 5)


def test_packed_documents_that_are_noted_are_those_of_the_next_pass_alone():
    context, model = BatchContext(), Model()
    context.observe(model)
    seen = []
    model.embed.register_forward_hook(lambda *_: seen.append(sequences_of(context, 6).sequences.index_T.tolist()))
    context.set_tokens(None, None, torch.tensor([[0, 0, 1], [0, 1, 1]]))
    for _ in range(2):
        model(torch.zeros(2, 3, dtype=torch.long))
    assert seen == [[0, 0, 1, 3, 4, 4], [0, 0, 0, 1, 1, 1]]


class Packed(Model):
    def forward(self, input_ids, attention_mask=None, sequence_id=None):
        return self.embed(input_ids)


PACKED = torch.tensor([[0, 0, 1], [0, 1, -1]])


def test_packed_documents_tell_the_padding_where_no_mask_does():
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 0, 0], [1, 1, 1]])
    real, noted = [True] * 5 + [False], BatchContext()
    noted.set_tokens(ids, None, PACKED)
    assert noted.for_tokens(6).mask_T.tolist() == real
    noted.set_tokens(ids, mask, PACKED)
    assert torch.equal(noted.for_tokens(6).mask_T, mask.flatten().bool())

    context, model, seen = BatchContext(), Packed(), []
    context.observe(model)
    model.embed.register_forward_hook(lambda *_: seen.append(context.for_tokens(6).mask_T))
    model(ids, sequence_id=PACKED)
    context.set_tokens(None, None, PACKED)
    model(ids)
    assert [mask_T.tolist() for mask_T in seen] == [real, real]
    for note in (None, PACKED):  # the mask of the arguments is the padding, and None says that there is none
        context.set_tokens(None, None, note)
        model(ids, attention_mask=mask, sequence_id=PACKED)
        assert torch.equal(seen[-1], mask.flatten().bool())
    model(ids, attention_mask=None, sequence_id=PACKED)
    assert seen[-1] is None
    model(ids, attention_mask=object(), sequence_id=PACKED)
    assert seen[-1] is None


def test_the_mask_of_an_outer_module_comes_before_the_documents_of_an_inner_one():
    class Outer(Packed):
        def forward(self, input_ids, attention_mask=None, sequence_id=None):
            return self.inner(input_ids, sequence_id=sequence_id)

    context, model, seen = BatchContext(), Outer(), []
    model.inner = Packed()
    context.observe(model)
    model.inner.embed.register_forward_hook(lambda *_: seen.append(context.for_tokens(6).mask_T))
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    model(torch.zeros(2, 3, dtype=torch.long), mask, PACKED)
    model(torch.zeros(2, 3, dtype=torch.long), sequence_id=PACKED)
    assert torch.equal(seen[0], mask.flatten().bool()) and seen[1].sum() == 5


def test_anchor_keeps_the_loss_and_records_what_the_trainer_makes_of_it():
    context = BatchContext()
    loss = torch.tensor(2.0, requires_grad=True)
    tracked = context.track_scale({"total": loss * 3, "part": loss})
    assert tracked["total"].item() == 6.0
    during = []
    loss.register_hook(lambda _: during.append(context.loss_scale(loss.device).item()))
    (tracked["total"] * 0.25).backward()
    assert during == [0.25] and context.loss_scale(loss.device).item() == 1
    assert loss.grad.item() == 0.75


def test_anchor_takes_tensors_tuples_and_losses_without_gradient():
    context = BatchContext()
    leaf = torch.tensor(1.0, requires_grad=True)
    first, second = context.track_scale((leaf * 2, torch.tensor(5.0)))
    assert (first.item(), second.item()) == (2.0, 5.0)


@pytest.mark.parametrize(("keys", "expected"), [(("a", "b"), [0, 1, 1, 0]), (("a", "a"), [0, 1, 2, 3])])
def test_a_recomputation_gets_what_its_own_call_computed_or_computes_it_again(keys, expected):
    """Two calls that give one key, as a layer that is used twice does, cannot be told apart."""
    context, seen, count = BatchContext(), [], itertools.count()

    class Checkpointed(Model):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for key in keys:
                x = checkpoint(self.call, x, key, use_reentrant=False)
            return x

        def call(self, x, key):
            seen.append(context.once(key, lambda: next(count)))
            return x.sin()

    model = Checkpointed()
    context.observe(model)
    model(torch.arange(3)[None]).sum().backward()
    assert seen == expected


def test_a_recomputed_module_keeps_what_its_pass_has_computed():
    context, seen, count = BatchContext(), [], itertools.count()

    class Inner(Model):
        def forward(self, input_ids):
            seen.append(context.once("a", lambda: next(count)))
            return self.embed(input_ids).sin()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, input_ids):
            return checkpoint(self.inner, input_ids, use_reentrant=False)

    model = Outer()
    context.observe(model)
    for _ in range(2):
        model(torch.arange(3)[None]).sum().backward()
    assert seen == [0, 0, 1, 1]
