"""Random programs for the solver: the building blocks of models, in random combinations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from solver.programs import traced
from torch import Tensor

from paraxis.solver import Program

WIDTHS = (8, 12, 16, 24)
SIZE = 4
"""Features of a head."""


def random_graph(seed: int, world: int = 2, length: int = 8, twice: bool = False) -> Program:
    """A program of about ``length`` blocks on several live tensors, of which one to four are returned.

    With ``twice``, a step may take the same tensor twice. Unused results are not removed: they are placed as well.
    """
    recorded: list[Tensor] = []

    def record(*shape: int) -> Tensor:
        recorded.append(torch.empty(shape))
        return recorded[-1]

    inputs = [torch.zeros(2, 6, dtype=torch.long), torch.empty(2, 6, 16)]
    _Writer(seed, length, twice, record).write(*inputs)  # once, to see which weights it takes

    def run(ids: Tensor, x: Tensor, *weights: Tensor) -> Any:
        taken: Iterator[Tensor] = iter(weights)
        return _Writer(seed, length, twice, lambda *shape: next(taken)).write(ids, x)

    return traced(run, inputs, recorded, world)


class _Writer:
    """Draws one block after the other; a block that does not fit the live tensors is drawn again."""

    def __init__(self, seed: int, length: int, twice: bool, weight: Callable[..., Tensor]) -> None:
        self.rng, self.length, self.twice, self.new = random.Random(seed), length, twice, weight
        self.live: list[Tensor] = []
        self.weights: list[Tensor] = []

    def write(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        self.live = [F.embedding(ids, self.weight(24, self.rng.choice(WIDTHS))) if self.rng.random() < 0.5 else x]
        parts = [self.linear, self.linear, self.packed, self.gated, self.tied, self.derived, self.unary, self.binary]
        parts += [self.binary, self.vector, self.norm, self.heads, self.merge, self.attend, self.products, self.softmax]
        parts += [self.total, self.along_features, self.join, self.part, self.experts]
        while len(self.live) <= self.length:
            made = self.rng.choice(parts)()
            if made is not None:
                self.live += made if isinstance(made, tuple) else (made,)
        others = self.rng.sample(self.live[1:-1], k=min(self.rng.randrange(4), len(self.live) - 2))
        return (self.live[-1], *others)

    # -- drawing -------------------------------------------------------------------------------------------------

    def weight(self, *shape: int) -> Tensor:
        self.weights.append(self.new(*shape))
        return self.weights[-1]

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True) -> Tensor | None:
        """A recent live tensor."""
        found = [t for t in self.live[-6:] if fits(t)]
        return self.rng.choice(found) if found else None

    def other(self, x: Tensor, fits: Callable[[Tensor], bool]) -> Tensor | None:
        """Another live tensor."""
        return self.pick(lambda t: (self.twice or t is not x) and fits(t))

    def wide(self) -> Tensor | None:
        """One with features in its last dimension."""
        return self.pick(lambda t: t.shape[-1] >= 8)

    def project(self, x: Tensor, width: int) -> Tensor:
        bias = self.weight(width) if self.rng.random() < 0.4 else None
        return F.linear(x, self.weight(width, x.shape[-1]), bias)

    # -- parts ---------------------------------------------------------------------------------------------------

    def linear(self) -> Any:
        x = self.wide()
        return None if x is None else self.project(x, self.rng.choice(WIDTHS))

    def packed(self) -> Any:
        """Several projections in one, equal or not."""
        x = self.wide()
        if x is None:
            return None
        width = self.rng.choice((8, 12))
        if self.rng.random() < 0.5:
            return self.project(x, 3 * width).chunk(3, dim=-1)
        q, k, v = self.project(x, 2 * width + 8).split([2 * width, 4, 4], dim=-1)
        return (q, k + v)

    def gated(self) -> Any:
        x = self.wide()
        if x is None:
            return None
        gate, up = self.project(x, 2 * self.rng.choice(WIDTHS)).chunk(2, dim=-1)
        return F.silu(gate) * up

    def tied(self) -> Any:
        """A weight that was used before."""
        found = [(x, w) for x in self.live[-6:] for w in self.weights if w.ndim == 2 and w.shape[1] == x.shape[-1]]
        return F.linear(*self.rng.choice(found)) if found else None

    def derived(self) -> Any:
        """A weight that is computed from a parameter."""
        x = self.wide()
        if x is None:
            return None
        w = self.weight(x.shape[-1], self.rng.choice(WIDTHS))
        made = self.rng.choice([lambda: w, lambda: w * 0.5, lambda: w.t().neg().t(), lambda: w / w.sum(0)])()
        return x @ made

    def unary(self) -> Any:
        x = self.pick()
        return self.rng.choice([F.relu, F.gelu, torch.neg, lambda t: t * 0.5])(x)

    def binary(self) -> Any:
        x = self.rng.choice(self.live[-6:])
        y = self.other(x, lambda t: t.shape == x.shape)
        return None if y is None else self.rng.choice([torch.add, torch.sub, torch.mul])(x, y)

    def vector(self) -> Any:
        x = self.wide()
        return None if x is None else self.rng.choice([torch.add, torch.mul])(x, self.weight(x.shape[-1]))

    def norm(self) -> Any:
        x = self.wide()
        if x is None:
            return None
        shape = (x.shape[-1],)
        if self.rng.random() < 0.5:
            return F.rms_norm(x, shape, self.weight(*shape))
        return F.layer_norm(x, shape, self.weight(*shape), self.weight(*shape))

    def heads(self) -> Any:
        x = self.pick(lambda t: t.ndim == 3 and t.shape[-1] >= 8 and t.shape[-1] % SIZE == 0)
        return None if x is None else x.view(*x.shape[:2], -1, SIZE).transpose(1, 2)

    def merge(self) -> Any:
        x = self.pick(lambda t: t.ndim == 4)
        return None if x is None else x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def attend(self) -> Any:
        """Attention from one projection into heads to two others, grouped or not."""
        x = self.pick(lambda t: t.ndim == 3 and t.shape[:2] == (2, 6) and t.shape[-1] >= 8)
        if x is None:
            return None
        heads, groups = self.rng.choice([(4, 4), (4, 2), (3, 3), (6, 3), (4, 1)])
        q, k, v = (self.project(x, n * SIZE).view(2, 6, n, SIZE).transpose(1, 2) for n in (heads, groups, groups))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
        return self.project(y.transpose(1, 2).reshape(2, 6, -1), 16)

    def products(self) -> Any:
        x = self.pick(lambda t: t.ndim >= 3)
        y = None if x is None else self.pick(lambda t: t.shape[:-2] == x.shape[:-2] and t.shape[-1] == x.shape[-1])
        return None if x is None or y is None else x @ y.transpose(-1, -2)

    def softmax(self) -> Any:
        x = self.pick(lambda t: t.ndim > 1)
        return None if x is None else F.softmax(x, self.rng.choice([-1, 1]))

    def total(self) -> Any:
        x = self.pick(lambda t: t.ndim > 2)
        if x is None:
            return None
        over, keep = self.rng.randrange(x.ndim), self.rng.random() < 0.7
        return self.rng.choice([torch.sum, torch.mean])(x, over, keepdim=keep)

    def along_features(self) -> Any:
        """What cannot be sharded on the last dimension."""
        x = self.pick()
        return self.rng.choice([lambda t: t.cumsum(-1), lambda t: t.flip(-1), lambda t: t.sort(-1).values])(x)

    def join(self) -> Any:
        x = self.rng.choice(self.live[-6:])
        y = self.other(x, lambda t: t.shape[:-1] == x.shape[:-1] and t.shape[-1] + x.shape[-1] <= 48)
        return None if y is None else torch.cat([x, y], -1)

    def part(self) -> Any:
        x = self.pick(lambda t: t.shape[-1] >= 16)
        return None if x is None else x[..., : x.shape[-1] // 2]

    def experts(self) -> Any:
        """Four experts, weighted by a router."""
        x = self.pick(lambda t: t.ndim == 3 and t.shape[-1] >= 8)
        if x is None:
            return None
        scores = F.linear(x, self.weight(4, x.shape[-1])).softmax(-1)
        made = torch.matmul(x.unsqueeze(1), self.weight(4, x.shape[-1], 8))
        return (made * scores.transpose(1, 2).unsqueeze(-1)).sum(1)
