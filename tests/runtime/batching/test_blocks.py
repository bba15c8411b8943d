"""The blocks of a paged KV cache: taken, released, and shared by prompts that begin alike."""

from __future__ import annotations

import random

from paraxis.runtime.batching.blocks import BlockPool


def test_blocks_are_taken_once_and_come_back() -> None:
    pool = BlockPool(3, 4)
    taken = [pool.take() for _ in range(4)]
    assert sorted(x for x in taken if x is not None) == [0, 1, 2] and taken[3] is None
    pool.release([0, 1, 2])
    assert pool.available == 3 and pool.used == 0
    assert [pool.blocks_for(n) for n in (1, 4, 5)] == [1, 1, 2]


def test_a_prefix_is_found_by_its_tokens() -> None:
    pool = BlockPool(4, 2)
    first = [pool.take(), pool.take()]
    assert None not in first
    pool.fill(first, [1, 2, 3, 4, 5], 0, 5)  # type: ignore[arg-type]
    assert pool.match([1, 2, 3, 4, 9]) == first
    assert pool.match([1, 2, 9, 9, 9]) == first[:1]
    assert pool.match([3, 4, 5]) == [], "the same tokens after others are another prefix"
    assert pool.match([1, 2, 3, 4]) == first[:1], "one token is left to be computed"
    assert pool.match([1, 2]) == []


def test_unused_prefixes_stay_until_their_memory_is_needed() -> None:
    pool = BlockPool(2, 2)
    blocks = [pool.take(), pool.take()]
    pool.fill(blocks, [1, 2, 3, 4], 0, 4)  # type: ignore[arg-type]
    pool.release(blocks)  # type: ignore[arg-type]
    assert pool.available == 2
    found = pool.match([1, 2, 3, 4, 5])
    assert found == blocks and pool.available == 0
    pool.release(found)
    assert pool.take() == blocks[1], "the end of a prefix goes first"
    assert pool.match([1, 2, 3, 4, 5]) == blocks[:1]


def test_without_sharing_nothing_is_found() -> None:
    pool = BlockPool(2, 2, sharing=False)
    blocks = [pool.take()]
    pool.fill(blocks, [1, 2], 0, 2)  # type: ignore[arg-type]
    assert pool.match([1, 2, 3]) == []
    pool.release(blocks)  # type: ignore[arg-type]
    assert pool.available == 2


def test_random_use_loses_no_block() -> None:
    """Each block is free, unused or in use, and a match always holds the tokens that were asked for."""
    draw, pool = random.Random(0), BlockPool(12, 2)
    held: list[tuple[list[int], list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(2000):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held)))[1])
            continue
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        blocks = pool.match(tokens)
        shared = len(blocks)
        assert [content[block] for block in blocks] == [tuple(tokens[: 2 * i + 2]) for i in range(shared)]
        while len(blocks) < pool.blocks_for(len(tokens)):
            block = pool.take()
            if block is None:
                break
            blocks.append(block)
            content[block] = tuple(tokens[: 2 * len(blocks)])
        if len(blocks) < pool.blocks_for(len(tokens)):
            pool.release(blocks)
            continue
        pool.fill(blocks, tokens, 0, len(tokens))
        held.append((tokens, blocks))
    for _, blocks in held:
        pool.release(blocks)
    assert pool.available == pool.count
