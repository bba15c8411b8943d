"""Attention on a paged KV cache on a GPU, against that of each sequence by itself."""

from __future__ import annotations

import pytest
import torch

from paraxis.compat.paged_attention import Scoring, attend_causal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = {
    # KV heads, query heads of each, sizes of a key and a value, block, (positions, new tokens), window, softcap, sinks
    "grouped": (2, 4, 64, 64, 16, [(37, 1), (200, 1), (5, 5), (90, 70)], 0, 0.0, False),
    "one head, sinks": (1, 1, 16, 32, 7, [(37, 1), (1, 1), (33, 33), (90, 7)], 0, 0.0, True),
    "window and softcap": (2, 3, 24, 24, 5, [(137, 1), (64, 1), (33, 33), (90, 17)], 20, 2.0, True),
    "window of one": (1, 2, 32, 32, 16, [(40, 1), (20, 20)], 1, 0.0, False),
    "size that is no power of two": (3, 1, 80, 80, 32, [(3, 1), (64, 1), (130, 130)], 40, 0.0, False),
    "blocks of one": (1, 8, 128, 128, 1, [(300, 1), (300, 40)], 0, 0.0, False),
    "many sequences": (8, 4, 128, 128, 32, [(50 + 7 * i, 1) for i in range(64)], 0, 0.0, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_each_sequence_attends_to_itself(case: str, dtype: torch.dtype) -> None:
    from paraxis.kernels.triton.paged_attention import paged_decode, paged_prefill, tile_list

    heads, groups, dk, dv, size, lengths, window, softcap, has_sinks = CASES[case]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    needed = [-(-length // size) for length, _ in lengths]
    blocks = torch.randperm(sum(needed) + 2)[: sum(needed)].split(needed)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for table, mine in zip(tables, blocks, strict=True):
        table[: len(mine)] = mine.int()
    keys, values = (draw(heads, (sum(needed) + 2) * size, d) for d in (dk, dv))
    tokens = sum(new for _, new in lengths)
    query = draw(1, heads * groups, tokens, dk)[0].transpose(0, 1)
    sinks = draw(heads * groups) if has_sinks else None
    how = Scoring(0.3, window, softcap, sinks)
    found, right = (torch.zeros(tokens, heads * groups, dv, device="cuda", dtype=t) for t in (dtype, torch.float64))
    start, single, several = 0, [], []
    for i, (length, new) in enumerate(lengths):
        slots = (blocks[i][:, None] * size + torch.arange(size)).flatten()[:length].cuda()
        k, v, q = (x.double() for x in (keys[:, slots].transpose(0, 1), values[:, slots].transpose(0, 1), query))
        own = slice(start, start + new)
        exact = None if sinks is None else sinks.double()
        right[own] = attend_causal(q[own], k, v, length - new, how._replace(sinks=exact))
        (single if new == 1 else several).append((i, start, new, length - new))
        start += new
    if single:
        which, rows, _, past = torch.tensor(single).unbind(1)
        paged_decode(query, keys, values, found, rows.cuda(), (past + 1).int().cuda(), tables[which].cuda(), size, how)
    if several:
        tiles = torch.tensor(tile_list(several, groups), dtype=torch.int32).cuda()
        paged_prefill(query, keys, values, found, tiles, tables.cuda(), size, how)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.double(), right, **close)
