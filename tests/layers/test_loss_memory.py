"""What the loss on logits split by class takes of memory, alone and inside a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.allocations import Allocations
from models.compare import parallel, reference
from models.tiny import save

from paraxis.layers import vocab_parallel_cross_entropy
from paraxis.placement import Layout
from ranks import RankPool

Ranks = Callable[[int], RankPool]

VOCABULARY, TOKENS = 128256, 512


def peak_of_loss(split: bool) -> tuple[int, int]:
    """(peak, largest) bytes of the loss forward and backward, logits not counted."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if split else (1, 0)
    start, stop = Layout.even(VOCABULARY, world).expand(VOCABULARY, rank)[0]
    logits = torch.randn(TOKENS, stop - start, requires_grad=True)
    target = torch.randint(0, VOCABULARY, (TOKENS,))
    with Allocations() as seen:
        if split:
            loss = vocab_parallel_cross_entropy(logits, target, dist.group.WORLD, start, VOCABULARY)
        else:
            loss = F.cross_entropy(logits, target)
        loss.backward()
    return seen.peak, seen.largest


def test_the_loss_takes_its_share_of_memory(ranks: Ranks) -> None:
    full, largest = peak_of_loss(split=False)
    assert largest == TOKENS * VOCABULARY * 4, "the full logits are measured"
    for peak, part in ranks(4).run(peak_of_loss, True):
        assert part <= largest / 4, "nothing of the size of the full logits"
        assert peak <= full * (1 / 4 + 0.02)


def model_and_loss(folder: str) -> list[tuple[int, int]]:
    """(peak, largest) of a training step of the parallel model and of the unsharded one."""
    model, _ = parallel(folder)
    unsharded = reference(folder)
    ids = torch.randint(3, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
    found = []
    for each in (model, unsharded):
        each.train()
        each(input_ids=ids, labels=ids, use_cache=False)  # compiles
        with Allocations() as seen:
            loss = each(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        found.append((seen.peak, seen.largest))
    return found


def test_a_model_never_builds_its_full_logits(ranks: Ranks, tmp_path: Path) -> None:
    """The loss that transformers computes inside the model, and the logits that it returns beside it."""
    folder = save("llama-tied", tmp_path, vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=64)
    for (peak, largest), (full_peak, full_largest) in ranks(2).run(model_and_loss, folder):
        logits = 2 * 64 * VOCABULARY * 4
        assert full_largest >= logits, "the full logits are measured"
        assert largest <= logits / 2 and peak <= full_peak * (1 / 2 + 0.05)
