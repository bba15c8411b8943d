"""Cross entropy on sharded logits against `F.cross_entropy` of the full ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.compare import context

from paraxis.distributed import count_collectives
from paraxis.layers import VocabParallelCrossEntropyLoss, vocab_parallel_cross_entropy
from paraxis.placement import Layout
from ranks import RankPool

Ranks = Callable[[int], RankPool]
Case = dict[str, Any]

CLASSES = 19  # uneven on two ranks and on four


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of `shape` and targets for them, some of which are -100."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, CLASSES, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=generator)
    if target.ndim:
        target.view(-1)[::3] = -100
        target.view(-1)[1] = CLASSES - 1
    return logits, target


def class_weights() -> torch.Tensor:
    return torch.rand(CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def upstream(loss: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(loss.dtype)


def expected_loss(shape: tuple[int, ...], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, target = inputs(shape)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, target, **options)
    loss.backward(upstream(loss))
    assert logits.grad is not None
    return loss.detach(), logits.grad


def ranges(world: int) -> list[tuple[int, int]]:
    return [Layout.even(CLASSES, world).expand(CLASSES, rank)[0] for rank in range(world)]


def parallel(cases: list[tuple[tuple[int, ...], Case]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    start, stop = ranges(dist.get_world_size())[dist.get_rank()]
    results = []
    for shape, options in cases:
        logits, target = inputs(shape)
        local = logits.narrow(min(1, logits.ndim - 1), start, stop - start).clone().requires_grad_()
        with count_collectives() as counter:
            loss = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, start, CLASSES, **options)
            loss.backward(upstream(loss))
        assert counter.counts == {"all_reduce": 2}  # a maximum and a sum, and none backward
        assert counter.bytes <= 4 * 8 * max(1, target.numel())  # nothing of the size of the logits
        assert local.grad is not None
        results.append((loss.detach(), local.grad))
    return results


def cases() -> list[tuple[tuple[int, ...], Case]]:
    found: list[tuple[tuple[int, ...], Case]] = []
    for weight, ignore_index, reduction, smoothing in itertools.product(
        (None, class_weights()), (-100, 5), ("mean", "sum", "none"), (0.0, 0.1, 1.0)
    ):
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        for shape in ((7, CLASSES), (3, CLASSES, 2, 2)):
            # Without -100 among them there would be targets that are no class.
            if ignore_index == -100:
                found.append((shape, options))
        found.append(((CLASSES,), {**options, "ignore_index": ignore_index}))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_gradient_are_those_of_full_logits(ranks: Ranks, world: int) -> None:
    known = cases()
    results = ranks(world).run(parallel, known)
    for i, (shape, options) in enumerate(known):
        loss, grad = expected_loss(shape, **options)
        for result in results:
            torch.testing.assert_close(result[i][0], loss, equal_nan=True, msg=lambda m, c=known[i]: f"{c}: {m}")
        together = torch.cat([result[i][1] for result in results], min(1, len(shape) - 1))
        torch.testing.assert_close(together, grad, msg=lambda m, c=known[i]: f"gradient, {c}: {m}")


def half_precision(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    start, stop = ranges(dist.get_world_size())[dist.get_rank()]
    logits, target = inputs((64, CLASSES), dtype)
    local = logits[:, start:stop].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, start, CLASSES)
    loss.backward()
    assert local.grad is not None
    return loss.detach(), local.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_accumulate_in_float32(ranks: Ranks, dtype: torch.dtype) -> None:
    logits, target = inputs((64, CLASSES), dtype)
    reference = logits.float().requires_grad_()
    loss = F.cross_entropy(reference, target)
    loss.backward()
    assert reference.grad is not None
    results = ranks(2).run(half_precision, dtype)
    for loss_, _ in results:
        assert loss_.dtype == dtype and loss_ == loss.to(dtype)
    together = torch.cat([grad for _, grad in results], 1)
    assert together.dtype == dtype
    torch.testing.assert_close(together, reference.grad.to(dtype))


def extremes() -> list[torch.Tensor]:
    start, stop = ranges(dist.get_world_size())[dist.get_rank()]
    logits, target = extreme_inputs()
    local = logits[:, start:stop].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, start, CLASSES, reduction="none")
    loss.sum().backward()
    ignored = torch.full_like(target, -100)
    nothing = local.detach().requires_grad_()
    mean = vocab_parallel_cross_entropy(nothing, ignored, dist.group.WORLD, start, CLASSES)
    mean.backward()
    return [loss.detach(), local.grad, mean.detach(), nothing.grad]  # type: ignore[list-item]


def extreme_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(4))
    logits[0] *= 1e4
    logits[1, :10] = float("-inf")  # all that the first rank holds
    logits[2, 12] = float("-inf")
    logits[3] += 1e6
    return logits, torch.tensor([3, 12, 12, 0])


def test_extreme_logits(ranks: Ranks) -> None:
    logits, target = extreme_inputs()
    logits.requires_grad_()
    loss = F.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    results = ranks(2).run(extremes)
    for loss_, _, mean, nothing in results:
        torch.testing.assert_close(loss_, loss.detach())
        assert mean.isnan() and (nothing == 0).all()  # as torch has it, where every target is ignored
    torch.testing.assert_close(torch.cat([result[1] for result in results], 1), logits.grad)


def modules() -> dict[str, Any]:
    ctx, rank, world = context(), dist.get_rank(), dist.get_world_size()
    start, stop = ranges(world)[rank]
    logits, target = inputs((7, CLASSES))
    local = logits[:, start:stop]
    told = VocabParallelCrossEntropyLoss(ctx, vocab_size=CLASSES)
    found = VocabParallelCrossEntropyLoss(ctx)
    weighted = VocabParallelCrossEntropyLoss(ctx, class_weights(), label_smoothing=0.2)
    legacy = VocabParallelCrossEntropyLoss(ctx, size_average=False)
    results: dict[str, Any] = {
        "told": told(local, target),
        "found": found(local, target),
        "weighted": weighted(local, target),
        "legacy": legacy(local, target),
        "text": repr(found),
    }
    with count_collectives() as counter:
        found(local, target)
    results["again"] = dict(counter.counts)
    calls = {
        "width": lambda: told(local[:, 1:], target),
        "probabilities": lambda: told(local, torch.rand(7, CLASSES)),
        "shape": lambda: told(local, target[1:]),
        "no class": lambda: told(local, torch.full((7,), CLASSES)),
        "reduction": lambda: VocabParallelCrossEntropyLoss(ctx, reduction="max")(local, target),
    }
    for name, call in calls.items():
        with pytest.raises((ValueError, NotImplementedError, RuntimeError, IndexError)) as caught:
            call()
        results[name] = str(caught.value)
    return results


def test_module_computes_the_loss_of_torch(ranks: Ranks) -> None:
    for results in ranks(2).run(modules):
        mean, _ = expected_loss((7, CLASSES))
        torch.testing.assert_close(results["told"], mean)
        torch.testing.assert_close(results["found"], mean)
        torch.testing.assert_close(
            results["weighted"], expected_loss((7, CLASSES), weight=class_weights(), label_smoothing=0.2)[0]
        )
        torch.testing.assert_close(results["legacy"], expected_loss((7, CLASSES), reduction="sum")[0])
        assert "vocab_size=19" in results["text"]
        assert results["again"] == {"all_reduce": 2}
        assert "holds classes" in results["width"]
        assert "not probabilities" in results["probabilities"]
        assert "does not fit the logits" in results["shape"]
        assert "out of bounds" in results["no class"]
        assert "max is not a valid value" in results["reduction"]


def compiled() -> None:
    start, stop = ranges(dist.get_world_size())[dist.get_rank()]
    logits, target = inputs((7, CLASSES))

    def loss_of(local: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(local, target, dist.group.WORLD, start, CLASSES, label_smoothing=0.1)

    grads = []
    for function in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
        local = logits[:, start:stop].clone().requires_grad_()
        function(local).backward()
        grads.append(local.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_compiled_loss_is_the_same(ranks: Ranks) -> None:
    ranks(2).run(compiled)
