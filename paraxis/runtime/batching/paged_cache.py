"""The paged KV cache of a rank: keys and values of its own heads, in blocks that sequences take as they grow."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from ...compat.paged_attention import Scoring, attend_causal
from ...kernels.cpu.paged_attention import fits, paged_decode
from .step import Step


class Layer(NamedTuple):
    """What the cache of a layer is like: (heads, size of a key, size of a value), dtype, and which KV heads it has."""

    sizes: tuple[int, int, int]
    dtype: torch.dtype
    heads: tuple[int, ...]

    @property
    def bytes_per_position(self) -> int:
        """What a position takes."""
        heads, key, value = self.sizes
        return heads * (key + value) * self.dtype.itemsize


class MeasuredStep:
    """A step of one sequence without a cache, from which the sizes of the layers are learned."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring, kv_heads: SequenceOf[int]) -> Tensor:
        """Attention without a cache."""
        self.layers.append(Layer((*key.shape[1:], value.shape[2]), key.dtype, tuple(kv_heads)))  # type: ignore[arg-type]
        return attend_causal(query, key, value, 0, how)


class PagedCache:
    """Keys and values of all layers: (heads, slots, size), where a block is ``block_size`` slots.

    Memory is taken from the machine when a block is written for the first time, on a CPU. The slot after all blocks,
    ``spare``, is for tokens that fill up a step and belong to no sequence.
    """

    def __init__(self, layers: list[Layer], blocks: int, block_size: int, device: torch.device) -> None:
        self.layers, self.blocks, self.block_size = layers, blocks, block_size
        self.spare = blocks * block_size
        slots = self.spare + 1
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layers:
            heads, key, value = layer.sizes
            self.keys.append(torch.empty(heads, slots, key, dtype=layer.dtype, device=device))
            self.values.append(torch.empty(heads, slots, value, dtype=layer.dtype, device=device))


class StepOnCache:
    """A step of the model on a paged cache. Its layers run one after the other, each once.

    Args:
        cache: The cache.
        slots: Where the keys and values of its tokens go, on the device.
    """

    def __init__(self, cache: PagedCache, slots: Tensor) -> None:
        self.cache, self.slots, self.next_layer = cache, slots, 0

    def check_complete(self) -> None:
        """Raise if the program of the step did not run all layers of the model."""
        if self.next_layer != len(self.cache.layers):
            raise RuntimeError(
                f"a step ran {self.next_layer} attention layers of {len(self.cache.layers)}: its KV cache is wrong"
            )

    def write(self, key: Tensor, value: Tensor, kv_heads: SequenceOf[int]) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the next layer; its cache."""
        number, self.next_layer = self.next_layer, self.next_layer + 1
        self._check(number, key, value, kv_heads)
        keys, values = self.cache.keys[number], self.cache.values[number]
        tokens = self.slots.shape[0]
        keys.index_copy_(1, self.slots, key[:tokens].transpose(0, 1))
        values.index_copy_(1, self.slots, value[:tokens].transpose(0, 1))
        return keys, values

    def _check(self, number: int, key: Tensor, value: Tensor, kv_heads: SequenceOf[int]) -> None:
        if number >= len(self.cache.layers):
            raise RuntimeError(f"a step ran more than {len(self.cache.layers)} attention layers: its KV cache is wrong")
        layer = self.cache.layers[number]
        found = Layer((*key.shape[1:], value.shape[2]), key.dtype, tuple(kv_heads))  # type: ignore[arg-type]
        if found != layer:
            raise RuntimeError(
                f"attention layer {number} has KV heads {found}, and its paged cache was made for {layer}: another "
                "program of the model places them in another way"
            )


class CachedStep(StepOnCache):
    """A step whose tables are on the host: every layer looks there which blocks a sequence has."""

    def __init__(self, cache: PagedCache, step: Step, device: torch.device) -> None:
        super().__init__(cache, step.slots(cache.block_size).to(device))
        self.step, self.device = step, device
        self.decoding = [each for each in step.sequences if each.tokens == 1]
        self.prefilling = [each for each in step.sequences if each.tokens > 1]
        self._positions: dict[int, Tensor] = {}
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring, kv_heads: SequenceOf[int]) -> Tensor:
        """Write the keys and values of the next layer, and attend. Tokens of no sequence, which fill up the step, get
        zeros."""
        keys, values = self.write(key, value, kv_heads)
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        if self.decoding:
            self._decode(query, keys, values, out, how)
        for each in self.prefilling:
            new = slice(each.start, each.start + each.tokens)
            k, v = key[new], value[new]
            if each.past:
                at = self._slots_of(each.start, each.past + each.tokens)
                k, v = (x.index_select(1, at).transpose(0, 1) for x in (keys, values))
            out[new] = attend_causal(query[new], k, v, each.past, how)
        return out

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, how: Scoring) -> None:
        """The sequences with one new token."""
        if fits(query, keys, values, how.sinks, how.softcap):
            size = self.cache.block_size
            paged_decode(query, keys, values, out, *self._decode_tables(), size, how.scale, how.window)
            return
        for each in self.decoding:
            at = self._slots_of(each.start, each.past + 1)
            if how.window:
                at = at[-how.window :]
            k, v = (x.index_select(1, at).transpose(0, 1) for x in (keys, values))
            one = slice(each.start, each.start + 1)
            out[one] = attend_causal(query[one], k, v, k.shape[0] - 1, how._replace(window=0))

    def _decode_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the sequences with one new token: their rows, their lengths, and their blocks, side by side."""
        if self._tables is None:
            rows = torch.tensor([each.start for each in self.decoding])
            lengths = torch.tensor([each.past + 1 for each in self.decoding])
            tables = torch.zeros(len(self.decoding), max(len(each.blocks) for each in self.decoding), dtype=torch.int64)
            for table, each in zip(tables, self.decoding, strict=True):
                table[: len(each.blocks)] = torch.from_numpy(each.blocks)
            self._tables = rows, lengths, tables
        return self._tables

    def _slots_of(self, start: int, positions: int) -> Tensor:
        """Where the first positions of the sequence with this token are."""
        if start not in self._positions:
            each = next(x for x in self.step.sequences if x.start == start)
            blocks = torch.from_numpy(each.blocks)
            size = self.cache.block_size
            self._positions[start] = (blocks[:, None] * size + torch.arange(size)).flatten().to(self.device)
        return self._positions[start][:positions]
