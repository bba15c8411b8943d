"""Small programs for the solver, captured or traced, without ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from paraxis.capture import capture, simplify, to_aten
from paraxis.passes.parameters import find_parameters
from paraxis.placement import Shard
from paraxis.solver import Program, Solution


def compiled_call_of(model: nn.Module, *args: Any, world: int = 2) -> Program:
    """The program of a model, captured as Paraxis does."""
    graphs: list[Any] = []
    with torch.no_grad():
        capture(model, args, {}, lambda graph, inputs: graphs.append((graph, inputs)))
    graph, inputs = graphs[0]
    names = {p.node: p.name for p in find_parameters(graph, SimpleNamespace(example_inputs=inputs, param_cache={}))}  # type: ignore[arg-type]
    aten = simplify(to_aten(graph))
    parameters = {n: names[n.meta["origin"]] for n in aten.graph.nodes if n.meta.get("origin") in names}
    return Program(aten, parameters, {}, world)


def traced(
    function: Callable[..., Any], inputs: list[torch.Tensor], weights: list[torch.Tensor], world: int
) -> Program:
    """The program of a function of inputs and weights."""
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs, *weights)
    leaves = [n for n in graph.graph.nodes if n.op == "placeholder"]
    return Program(graph, {n: n.name for n in leaves[len(inputs) :]}, {}, world)


def random_program(seed: int, world: int = 2) -> Program:
    """A short random program of linears, elementwise functions, sums and views on a few live tensors."""
    rng = random.Random(seed)
    width = rng.choice([8, 16])
    plan = [
        rng.choice(["linear", "linear", "relu", "add", "heads", "mul", "linear"]) for _ in range(rng.choice([3, 4, 5]))
    ]
    picks = [(rng.random(), rng.random()) for _ in plan]
    weights = [torch.empty(width, width) for step in plan if step == "linear"]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        taken = iter(parameters)
        live = [x]
        for step, (a, b) in zip(plan, picks):
            left, right = live[int(a * len(live))], live[int(b * len(live))]
            if step == "linear":
                new = F.linear(left, next(taken))
            elif step == "relu":
                new = torch.relu(left)
            elif step == "heads":
                new = torch.relu(left.view(4, 2, width // 2)).reshape(4, width)
            else:
                new = left + right if step == "add" else left * right
            live.append(new)
        return live[-1], live[-2]

    return traced(run, [torch.empty(4, width)], weights, world)


class Attention(nn.Module):
    """Multi-head attention, grouped or not."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Feedforward(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, one after the other or in parallel."""

    def __init__(self, width: int, heads: int, kv_heads: int, parallel: bool) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, kv_heads), Feedforward(width, 2 * width)
        self.norm, self.norm2, self.parallel = nn.RMSNorm(width), nn.RMSNorm(width), parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel:
            y = self.norm(x)
            return x + self.attention(y) + self.mlp(y)
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embedding, blocks, head: a model whose best plan is known."""

    def __init__(
        self, layers: int = 2, width: int = 32, heads: int = 8, kv_heads: int = 8, parallel: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, parallel) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 96, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def transformer_program(world: int = 4) -> Program:
    """Two blocks of the transformer, captured."""
    return compiled_call_of(Transformer(layers=2), torch.zeros(2, 8, dtype=torch.long), world=world)


def sharded_dims(program: Program, solution: Solution, name: str) -> list[int]:
    """The dimensions on which a solution shards a parameter."""
    placement = next(p for v, p in solution.parameters.items() if program.parameters[v] == name)
    return [d for d, _ in placement.layouts] if isinstance(placement, Shard) else []
