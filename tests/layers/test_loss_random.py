"""Cross entropy on logits split by class: random cases against `F.cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paraxis.layers import vocab_parallel_cross_entropy
from paraxis.placement import Layout
from ranks import RankPool

Ranks = Callable[[int], RankPool]
CLASSES, WORLD = 251, 4  # 63, 63, 63 and 62 of them


@dataclass(frozen=True)
class Case:
    """A call of `F.cross_entropy`, in what can be told to a rank."""

    seed: int
    batch: int | None  # None: logits of one sample, without a dimension for the batch
    dims: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    weighted: bool
    ignore_index: int
    ignored: float  # the part of the targets that is ignored
    reduction: str
    smoothing: float

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits, targets and class weights."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (CLASSES,) if self.batch is None else (self.batch, CLASSES, *self.dims)
        logits = (self.scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(self.dtype)
        targets = () if self.batch is None else (self.batch, *self.dims)
        target = torch.randint(0, CLASSES, targets, generator=generator)
        target[torch.rand(targets, generator=generator) < self.ignored] = self.ignore_index
        weight = torch.rand(CLASSES, generator=generator, dtype=torch.float64).to(self.dtype)
        return logits, target, weight if self.weighted else None

    def options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.smoothing,
        }


cases = st.builds(
    Case,
    seed=st.integers(0, 2**20),
    batch=st.one_of(st.none(), st.integers(0, 5)),
    dims=st.sampled_from([(), (3,), (2, 2), (1, 2, 2)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    weighted=st.booleans(),
    ignore_index=st.sampled_from([-100, -1, 0, 62, 63, 250]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
)


def upstream(loss: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(loss.shape, generator=generator, dtype=torch.float64).to(loss.dtype)


def on_a_rank(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    start, stop = Layout.even(CLASSES, WORLD).expand(CLASSES, dist.get_rank())[0]
    logits, target, weight = case.tensors()
    local = logits.narrow(min(1, logits.ndim - 1), start, stop - start).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, dist.group.WORLD, start, CLASSES, weight, **case.options())
    loss.backward(upstream(loss))
    assert local.grad is not None
    return loss.detach(), local.grad


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Narrow dtypes as they would be if torch accumulated in float32 throughout."""
    logits, target, weight = case.tensors()
    wide = torch.promote_types(case.dtype, torch.float32)
    logits = logits.to(wide).requires_grad_()
    loss = F.cross_entropy(logits, target, weight.to(wide) if weight is not None else None, **case.options())
    loss.backward(upstream(loss.detach().to(case.dtype)).to(wide))
    assert logits.grad is not None
    return loss.detach().to(case.dtype), logits.grad.to(case.dtype)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases)
def test_random_cases(ranks: Ranks, case: Case) -> None:
    loss, grad = expected(case)
    results = ranks(WORLD).run(on_a_rank, case)
    for found, _ in results:
        torch.testing.assert_close(found, loss, equal_nan=True)
    together = torch.cat([part for _, part in results], min(1, grad.ndim - 1))
    torch.testing.assert_close(together, grad, equal_nan=True)
