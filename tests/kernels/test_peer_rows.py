"""Rows stored into the memory of other ranks: the kernels against their plain twins, all ranks in one process."""

import pytest
import torch
from foundry_moe_kernels import peer_rows as kernels

from foundry_moe.ops.dispatch_plan import plan_plain
from foundry_moe.ops.peer_rows import PeerRegion, plan_places_plain

pytestmark = pytest.mark.quick
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E = 12


def _regions(ranks: int, size: int) -> list[PeerRegion]:
    """The memory of all ranks as each of them sees it."""
    memory = tuple(torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(ranks))
    pointers_P = torch.tensor([m.data_ptr() for m in memory], device=DEVICE)
    return [PeerRegion(memory=memory, pointers_P=pointers_P, me=me, size=size) for me in range(ranks)]


def _plans(ranks: int, top_k: int, chunks: int):
    """Per rank: experts_TK, counts_PH2, row_TC, packed; ranks have 0, 7, 14, ... tokens."""
    generator = torch.Generator().manual_seed(ranks)
    for rank in range(ranks):
        experts_TK = torch.rand(7 * rank, E, generator=generator).argsort(1)[:, :top_k].contiguous()
        experts_TK[::5] = -1
        weights_TK = torch.rand(experts_TK.shape, generator=generator)
        counts_PH2, assign = plan_plain(experts_TK, weights_TK, E // ranks, ranks, 1, chunks)
        yield experts_TK.to(DEVICE), counts_PH2.to(DEVICE), *(tensor.to(DEVICE) for tensor in assign())


@pytest.mark.parametrize(("ranks", "top_k", "chunks"), [(2, 4, 1), (3, 2, 2), (4, 4, 3)])
def test_counts_and_places_are_those_of_plain_torch(ranks, top_k, chunks):
    regions = _regions(ranks, ranks * ranks * chunks * 16)
    plans = list(_plans(ranks, top_k, chunks))
    for region, (_, counts_PH2, _, _) in zip(regions, plans, strict=True):
        kernels.store_counts(counts_PH2, region.pointers_P, region.me)
    everyone = torch.stack([counts for _, counts, _, _ in plans])
    for me, region in enumerate(regions):
        stored = region.rows(me, ranks * chunks * 2, torch.int64).view(ranks, ranks, chunks, 2)
        counts, places = kernels.plan_places(stored, me)
        assert torch.equal(counts, everyone)
        assert torch.equal(places, plan_places_plain(everyone, me)[1])


@pytest.mark.parametrize(("ranks", "top_k", "chunks"), [(2, 4, 1), (3, 2, 2)])
def test_rows_arrive_in_order_of_chunk_and_rank_and_come_back_to_where_they_left(
    ranks, top_k, chunks, dtype=torch.float16
):
    plans = list(_plans(ranks, top_k, chunks))
    everyone = torch.stack([counts for _, counts, _, _ in plans])
    places = [plan_places_plain(everyone, me)[1] for me in range(ranks)]
    width, local = 80, E // ranks
    there, back = _regions(ranks, 1 << 16), _regions(ranks, 1 << 16)
    tokens = [torch.randn(len(row_TC), width, device=DEVICE).to(dtype) for _, _, row_TC, _ in plans]
    for me, (experts_TK, _, row_TC, _) in enumerate(plans):
        step = -(-len(row_TC) // chunks)
        for h in range(chunks):
            some = range(min(h * step, len(row_TC)), min((h + 1) * step, len(row_TC)))
            region = there[me]
            kernels.store_tokens(
                tokens[me],
                row_TC,
                experts_TK,
                local,
                places[me][h, 0],
                region.pointers_P,
                region.limit(tokens[me]),
                some,
            )
    for me, (_, counts, row_TC, _) in enumerate(plans):
        sent = int(counts[..., 0].sum())
        received = everyone[:, me, :, 0].sum(0).tolist()
        begin = 0
        for h in range(chunks):
            rows = there[me].rows(me, width, dtype)[begin : begin + received[h]].clone()
            begin += received[h]
            kernels.store_blocks(rows, places[me][h, 1], back[me].pointers_P, back[me].limit(rows), me)
        assert sent == 0 or int(row_TC.max()) == sent - 1
    for me, (_, _, row_TC, _) in enumerate(plans):
        rows = back[me].rows(me, width, dtype)
        token, column = (row_TC >= 0).nonzero(as_tuple=True)
        assert torch.equal(rows[row_TC[token, column].long()], tokens[me][token])


def test_rows_past_the_region_are_not_stored():
    regions = _regions(2, 4 * 16)
    places = torch.tensor([[0, 3], [3, 3], [2, 3]], dtype=torch.int32, device=DEVICE)
    rows = torch.arange(24.0, device=DEVICE).view(6, 4)
    for target in regions:
        kernels.store_blocks(rows, places, target.pointers_P, target.limit(rows), 0)
    first, second = (regions[0].rows(rank, 4, torch.float32) for rank in range(2))
    assert torch.equal(first[2:], rows[:2]) and torch.equal(second[3:], rows[3:4])
    assert torch.isnan(first[:2]).all() and torch.isnan(second[:3]).all()
