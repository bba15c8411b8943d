"""Steps of a batch on a GPU: what they need to know of their sequences is in tensors on the device.

So no layer waits for the host, and a decode step can be captured as a CUDA graph and replayed with other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...compat.paged_attention import Scoring
from .paged_cache import PagedCache, StepOnCache
from .step import Sequence, Step


class Decoding(NamedTuple):
    """The sequences with one new token: its row in the step, how many positions they have with it, and their blocks."""

    rows: Tensor
    lengths: Tensor
    tables: Tensor


class Prefilling(NamedTuple):
    """The sequences with several new tokens: (row of the table, first token, tokens, positions before), and their
    blocks."""

    sequences: list[tuple[int, int, int, int]]
    tables: Tensor


class DeviceStep(StepOnCache):
    """A step whose tables are on the device.

    Args:
        cache: The paged KV cache.
        slots: Where the keys and values of its tokens go.
        decoding: The sequences with one new token.
        prefilling: Those with several.
    """

    on_device = True

    def __init__(
        self, cache: PagedCache, slots: Tensor, decoding: Decoding | None, prefilling: Prefilling | None = None
    ) -> None:
        super().__init__(cache, slots)
        self.decoding, self.prefilling = decoding, prefilling
        self._tiles: dict[int, Tensor] = {}

    @staticmethod
    def of(cache: PagedCache, step: Step, device: torch.device) -> DeviceStep:
        """The step, with its tables copied to the device."""
        single = [each for each in step.sequences if each.tokens == 1]
        several = [each for each in step.sequences if each.tokens > 1]
        decoding = prefilling = None
        if single:
            rows = torch.tensor([each.start for each in single])
            lengths = torch.tensor([each.past + 1 for each in single], dtype=torch.int32)
            decoding = Decoding(rows.to(device), lengths.to(device), table_of(single).to(device))
        if several:
            sequences = [(i, each.start, each.tokens, each.past) for i, each in enumerate(several)]
            prefilling = Prefilling(sequences, table_of(several).to(device))
        return DeviceStep(cache, step.slots(cache.block_size).to(device), decoding, prefilling)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scoring, kv_heads: SequenceOf[int]) -> Tensor:
        """Write the keys and values of the next layer, and attend. Tokens of no sequence get zeros."""
        from ...kernels.triton import paged_attention as kernels

        keys, values = self.write(key, value, kv_heads)
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        if not out.numel():  # a rank without heads
            return out
        query = query if query.stride(2) == 1 else query.contiguous()
        size = self.cache.block_size
        if self.decoding is not None:
            kernels.paged_decode(query, keys, values, out, *self.decoding, size, how)
        if self.prefilling is not None:
            groups = query.shape[1] // keys.shape[0]
            if groups not in self._tiles:
                found = kernels.tile_list(self.prefilling.sequences, groups)
                self._tiles[groups] = torch.tensor(found, dtype=torch.int32).to(query.device)
            tiles, tables = self._tiles[groups], self.prefilling.tables
            kernels.paged_prefill(query, keys, values, out, tiles, tables, size, how)
        return out


def runs_on(device: torch.device) -> bool:
    """Whether steps on this device can have their tables there: its kernels are written in Triton."""
    return device.type == "cuda" and find_spec("triton") is not None


def table_of(sequences: list[Sequence], width: int | None = None) -> Tensor:
    """The blocks of sequences, one row each, of as many columns as the longest needs."""
    columns = max(len(each.blocks) for each in sequences) if width is None else width
    table = np.zeros((len(sequences), columns), dtype=np.int32)
    for row, each in zip(table, sequences, strict=True):
        row[: len(each.blocks)] = each.blocks
    return torch.from_numpy(table)


class DecodeBuffers:
    """The tensors of decode steps with up to so many sequences: their addresses stay the same.

    Args:
        cache: The paged KV cache.
        rows: How many sequences there may be. The rest of a step is filled up with tokens of no sequence.
        columns: The most blocks of a sequence.
        device: Where the tensors are.
    """

    def __init__(self, cache: PagedCache, rows: int, columns: int, device: torch.device) -> None:
        self.cache, self.size = cache, rows
        pinned: dict[str, Any] = {"pin_memory": device.type == "cuda"}
        self._host = torch.zeros(3, rows, dtype=torch.int64, **pinned)  # ids, positions, slots
        self._host_tables = torch.zeros(1 + columns, rows, dtype=torch.int32, **pinned).flatten()  # lengths, blocks
        self._tokens, self._tables = (torch.zeros_like(x, device=device) for x in (self._host, self._host_tables))
        self.ids, self.positions, self.slots = self._tokens.unbind()
        self.lengths, self.tables = self._tables[:rows], self._tables[rows:].view(rows, columns)
        self.rows = torch.arange(rows, device=device)

    def fill(self, step: Step) -> None:
        """Copy a step of single tokens to the device, in the order of the current stream."""
        count, tokens, numbers = len(step.sequences), self._host.numpy(), self._host_tables.numpy()
        lengths, tables = numbers[: self.size], numbers[self.size :].reshape(self.size, -1)
        tokens[0, :count], tokens[0, count:] = step.ids, 0
        tokens[1, :count], tokens[1, count:] = step.positions, 0
        tokens[2, :count], tokens[2, count:] = step.slots(self.cache.block_size).numpy(), self.cache.spare
        lengths[:count], lengths[count:] = step.positions + 1, 0
        for row, each in zip(tables, step.sequences, strict=False):
            row[: len(each.blocks)] = each.blocks
        self._tokens.copy_(self._host, non_blocking=True)
        self._tables.copy_(self._host_tables, non_blocking=True)

    def step(self) -> DeviceStep:
        """The step that the buffers have."""
        decoding = Decoding(self.rows, self.lengths, self.tables)
        return DeviceStep(self.cache, self.slots, decoding)
