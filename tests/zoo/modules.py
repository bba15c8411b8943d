"""Plain modules, without transformers, as people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import Case

WIDTH, HEADS = 32, 4


class MLP(nn.Module):
    """Linear layers and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Residual(nn.Module):
    """Pre-norm residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(64, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.silu(up(norm(x))))
        return x


class Chunked(nn.Module):
    """``chunk``, ``unbind`` and ``stack``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, WIDTH // HEADS).unbind(2)
        scores = torch.stack([(q * k).sum(-1), (q * v).sum(-1)], dim=0).mean(0)
        x = x + self.out((v * scores.softmax(1).unsqueeze(-1)).reshape(b, s, WIDTH))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class EinsumAttention(nn.Module):
    """Attention with einsum and 3-dimensional weights."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, size) / 6) for _ in range(3))
        self.o = nn.Parameter(torch.randn(HEADS, size, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bsd,dhe->bhse", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bhse,bhte->bhst", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhst,bhte,hed->bsd", scores.softmax(-1), v, self.o)


class HandAttention(nn.Module):
    """Causal attention by hand, with a mask in a buffer and grouped key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * (HEADS // 2) * size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, HEADS // 2, -1).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.mask[:s, :s], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    """``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class Decoder(nn.Module):
    """``nn.TransformerDecoder``: cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, memory)


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: attention and MLP modulated by the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        parts = self.modulation(F.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        y = self.norm1(x) * (1 + parts[0]) + parts[1]
        q, k, v = self.qkv(y).reshape(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, WIDTH)
        x = x + parts[2] * self.out(y)
        y = self.norm2(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.down(F.gelu(self.up(y), approximate="tanh"))


class ConvNet(nn.Module):
    """Plain, depthwise and pointwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up, self.down, self.head = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1), nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        x = x + self.down(F.gelu(self.up(self.deep(x))))
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """A mixture of experts with the weights of all in one tensor and soft routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 64) / 6), nn.Parameter(torch.randn(4, 64, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        y = torch.einsum("bsd,edf->ebsf", x, self.up).relu()
        return torch.einsum("ebsf,efd,bse->bsd", y, self.down, weights)


class TwoHeads(nn.Module):
    """Tied embedding and head, a learned position table, and a second small head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(64, WIDTH), nn.Embedding(16, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head, self.value = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 1)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = x + self.down(self.up(x).relu())
        return self.head(x), self.value(x).squeeze(-1)


class DataDependent(nn.Module):
    """Python that depends on the data: a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(), MLP()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.mean().item() > 100:
            x = -x
        return self.second(x * self.scale)


def hidden(*shape: int) -> torch.Tensor:
    """Random hidden states."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


INPUTS: dict[type[nn.Module], dict[str, Any]] = {
    Decoder: {"x": hidden(2, 6, WIDTH), "memory": hidden(2, 5, WIDTH)},
    DiffusionBlock: {"x": hidden(2, 6, WIDTH), "time": hidden(2, WIDTH)},
    ConvNet: {"image": hidden(2, 3, 8, 8)},
    TwoHeads: {"ids": torch.arange(12).view(2, 6)},
}
ALL = (MLP, Residual, Chunked, EinsumAttention, HandAttention, Attention, Encoder, Decoder, DiffusionBlock, ConvNet)
ALL += (Experts, TwoHeads, DataDependent)


def module_cases() -> list[Case]:
    """All of them, by the name of the class."""
    plain = {"x": hidden(2, 6, WIDTH)}
    return [Case(kind.__name__, "module", kind, lambda _, k=kind: dict(INPUTS.get(k, plain))) for kind in ALL]
