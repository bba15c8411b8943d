"""The tensors of a decode step, at the same addresses from step to step and from one ``generate`` to the next.

A compiled program is called with the same objects in every step, so that a CUDA graph can be replayed without copies.
All of them are on the device, and steps update them there.
"""

from __future__ import annotations

from typing import Any

import torch

from ...compat.dynamo import specialize
from ...compat.generation import clear_dynamic_cache, fill_dynamic_cache, preallocated_cache, take_states
from ...compat.torch import foreach_copy, foreach_zero
from ...context import ParallelExecutionCtx
from ...distributed.consensus import all_gather_object
from ...tensor.sharded_tensor import ShardedTensor, spec_of
from .cache_sizes import capacity_for, memory_limit, rows_for
from .captured_steps import CapturedSteps
from .late_look import LateLook

MAX_POOLED = 4
"""Kinds of calls whose tensors stay for the next one."""


class UnsupportedCache(RuntimeError):
    """A KV cache whose batch or length is sharded: decode steps write single positions of all sequences."""


class DecodeState:
    """The tensors of the decode steps of one batch.

    Attributes:
        batch: The sequences.
        capacity: The positions of the KV cache.
        affordable: How many it may have beyond those that it needs.
        token: The token of every row that the next step reads; there may be more rows than sequences.
        positions: Its position, where the model takes positions.
        mask: Which positions of the cache are no padding, where there is padding.
        length: How many positions of the cache are in use.
        cache: The KV cache; None until :meth:`fill`.
        sequences: The tokens so far, and room for those to come.
        column: The column of ``sequences`` that the next token belongs to.
        unfinished: One for every sequence that has not ended, zero for others.
        invalid: Whether probabilities were not finite in some step.
        signals: What the host looks at: the tokens of a step, whether a sequence has not ended, and ``invalid``.
        captured: CUDA graphs of steps on these tensors.
        cache_bytes: The memory of the KV cache on this rank.
        look: What the host sees of the steps. The pinned memory that it takes is slow to allocate.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        device: torch.device,
        position_rows: int,
        masked: bool,
        affordable: int | None = None,
    ) -> None:
        self.batch, self.capacity, self.rows, self.affordable = batch, capacity, rows_for(batch), affordable
        self.masked, self.position_rows = masked, position_rows
        self.cache: Any = None
        self.has_run = False
        """Whether a step has run on these tensors."""
        self.captured = CapturedSteps()
        self.cache_bytes = 0
        self._storages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last_places: tuple[Any, list[torch.Tensor]] = None, []
        self._form: Any = None
        self.look = LateLook(batch, device)
        with torch.inference_mode(False), torch.no_grad():  # tensors that can be written to in any mode
            like: dict[str, Any] = {"dtype": torch.int64, "device": device}
            self.token = torch.zeros(self.rows, 1, **like)
            rows = 1 if position_rows == 1 else self.rows
            self.positions = torch.zeros(rows, 1, **like) if position_rows else None
            self.mask = torch.ones(self.rows, capacity, **like) if masked else None
            self.length = torch.zeros((), **like)
            self.sequences = torch.zeros(batch, capacity + 1, **like)
            self.column = torch.zeros(1, **like)
            self.unfinished = torch.ones(batch, **like)
            self.invalid = torch.zeros((), dtype=torch.bool, device=device)
            self.signals = torch.zeros(batch + 2, **like)
        for tensor in (self.token, self.positions, self.mask):
            if tensor is not None:
                specialize(tensor)

    # -- the start of a call -----------------------------------------------------------------------------------

    def start(self, input_ids: torch.Tensor) -> None:
        """Take the prompts of a new call."""
        length = input_ids.shape[1]
        if length:
            self.sequences.copy_(input_ids[:, :1])  # a column that is not written yet holds a token that has occurred
            self.sequences[:, :length].copy_(input_ids)
        self.column.fill_(length)
        self.unfinished.fill_(1)
        self.invalid.fill_(False)

    def fill(self, prefilled: Any, length: int, positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Take the keys and values of a prefill, whose cache is empty afterwards; and the positions and the mask of its
        ``length`` tokens."""
        states = take_states(prefilled)
        self._allocate(states)
        found = [_local(state) for keys, values, _ in states for state in (keys, values)]
        foreach_copy(self._places(length, [x.shape[2] for x in found]), found)
        self.length.fill_(length)
        if self.positions is not None and positions is not None:
            self.positions[: positions.shape[0]].copy_(positions[:, -1:] + 1)
        if self.mask is not None and mask is not None:
            self.mask[: self.batch, :length].copy_(mask)
            self.mask[: self.batch, length:].fill_(1)

    def _places(self, length: int, counts: list[int]) -> list[torch.Tensor]:
        """The positions of every layer's keys and values that a prefill of ``length`` tokens fills, of which it has the
        last ``counts``."""
        if self._last_places[0] != (length, counts):
            storages = [storage for pair in self._storages for storage in pair]
            places = [x[: self.batch, :, length - n : length] for x, n in zip(storages, counts, strict=True)]
            self._last_places = (length, counts), places
        return self._last_places[1]

    def _allocate(self, states: list[tuple[torch.Tensor, torch.Tensor, int | None]]) -> None:
        """Keys and values like these for all positions; zeros, as what is hidden by a mask must be finite."""
        form = [_form(state) for keys, values, _ in states for state in (keys, values)]
        if self.cache is not None and form == self._form:
            foreach_zero([storage for pair in self._storages for storage in pair])
            return
        self.cache, self._storages, layers = None, [], []
        self._last_places = None, []
        self.captured = CapturedSteps()
        with torch.inference_mode(False), torch.no_grad():
            for keys, values, window in states:
                pair = [_empty_like(state, self.rows, self.capacity) for state in (keys, values)]
                self._storages.append((_local(pair[0]), _local(pair[1])))
                layers.append((pair[0], pair[1], window is not None))
        foreach_zero([storage for pair in self._storages for storage in pair])
        for keys, values, _ in layers:
            specialize(keys)
            specialize(values)
        self.cache, self._form = preallocated_cache(layers, self.length), form
        self.cache_bytes = _bytes(self._storages)

    # -- a step ------------------------------------------------------------------------------------------------

    def inputs(self, others: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model's forward; ``others`` do not change from step to step."""
        found = {**others, "input_ids": self.token, "past_key_values": self.cache, "use_cache": True}
        if self.positions is not None:
            found["position_ids"] = self.positions
        if self.mask is not None:
            found["attention_mask"] = self.mask
        return found

    def advance(self) -> None:
        """After a forward: its token is in the cache now."""
        self.length.add_(1)
        if self.positions is not None:
            self.positions.add_(1)

    def append(self, tokens: torch.Tensor) -> None:
        """Append the next tokens to the sequences; the next forward reads them."""
        column = tokens[:, None]
        self.sequences.index_copy_(1, self.column, column)
        self.column.add_(1)
        self.token[: self.batch].copy_(column)

    def signal(self, tokens: torch.Tensor) -> None:
        """Write what the host looks at after this step."""
        batch = self.batch
        self.signals[:batch].copy_(tokens)
        torch.amax(self.unfinished, 0, out=self.signals[batch])
        self.signals[batch + 1].copy_(self.invalid)

    # -- another capacity, and the end -------------------------------------------------------------------------

    def grown(self, length: int, cached: int) -> DecodeState:
        """A state with room for ``length`` positions, in the middle of a call with ``cached`` ones in use."""
        capacity = capacity_for(length, self.affordable)
        other = DecodeState(self.batch, capacity, self.token.device, self.position_rows, self.masked, self.affordable)
        for mine, theirs in (
            (self.token, other.token),
            (self.positions, other.positions),
            (self.length, other.length),
            (self.column, other.column),
            (self.unfinished, other.unfinished),
            (self.invalid, other.invalid),
        ):
            if mine is not None and theirs is not None:
                theirs.copy_(mine)
        other.sequences[:, :1].copy_(self.sequences[:, :1])
        other.sequences.copy_(other.sequences[:, :1].clone())
        width = self.sequences.shape[1]
        other.sequences[:, :width].copy_(self.sequences)
        if self.mask is not None and other.mask is not None:
            other.mask[:, : self.capacity].copy_(self.mask)
        layers: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        for layer in self.cache.layers:
            pair = [_empty_like(state, self.rows, capacity) for state in (layer.keys, layer.values)]
            for new, old in zip(pair, (layer.keys, layer.values), strict=True):
                _local(new)[:, :, :cached].copy_(_local(old)[:, :, :cached])
                _local(new)[:, :, cached:].zero_()
                specialize(new)
            other._storages.append((_local(pair[0]), _local(pair[1])))
            layers.append((pair[0], pair[1], layer.is_sliding))
            layer.keys = layer.values = None
        other.look = self.look
        other.cache, other._form, other.has_run = preallocated_cache(layers, other.length), self._form, True
        other.cache_bytes = _bytes(other._storages)
        self.cache, self._storages, self.cache_bytes, self._last_places = None, [], 0, (None, [])
        self.captured = CapturedSteps()
        return other

    def write_back(self, cache: Any, cached: int) -> Any:
        """Fill the dynamic cache that the prefill came from with copies of the ``cached`` positions in use."""
        states = []
        for layer, mine in zip(cache.layers, self.cache.layers, strict=True):
            window = getattr(layer, "sliding_window", None)
            count = cached if window is None else min(cached, window - 1)
            states.append(
                (
                    _copy(mine.keys, cached - count, cached, self.batch),
                    _copy(mine.values, cached - count, cached, self.batch),
                )
            )
        clear_dynamic_cache(cache)
        fill_dynamic_cache(cache, states, cached)
        return cache


class StatePool:
    """The states of earlier calls, for further ones of the same kind.

    No result refers to their memory, and they take no more than :func:`.memory_limit`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._common_limit: int | None = None
        self._states: list[DecodeState] = []  # the last used first

    def take(
        self, batch: int, capacity: int, position_rows: int, masked: bool, affordable: int | None = None
    ) -> DecodeState:
        """A state for a call, which is the only one to have it until it returns it."""
        kind = (batch, capacity, position_rows, masked)
        for state in self._states:
            if (state.batch, state.capacity, state.position_rows, state.masked) == kind:
                self._states.remove(state)
                return state
        return DecodeState(batch, capacity, self.device, position_rows, masked, affordable)

    def give(self, state: DecodeState) -> None:
        """Put back a state that is not used any more, and drop old ones."""
        self._states.insert(0, state)
        limit = memory_limit(self.device)
        while self._states and sum(each.cache_bytes for each in self._states) > limit:
            self._states.pop()
        del self._states[MAX_POOLED:]

    def common_limit(self, ctx: ParallelExecutionCtx) -> int:
        """The least :func:`.memory_limit` of all tensor-parallel ranks. A collective, the first time."""
        if self._common_limit is None:
            self._common_limit = min(all_gather_object(ctx.tp_group, memory_limit(self.device), "sizing a KV cache"))
        return self._common_limit


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if isinstance(tensor, ShardedTensor) else tensor


def _bytes(storages: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(x.nbytes for pair in storages for x in pair)


def _form(state: torch.Tensor) -> Any:
    """What keys or values have in common with those of another call of the same batch."""
    local = _local(state)
    placement = state.placement if isinstance(state, ShardedTensor) else None
    return (state.shape[1], state.shape[3], *local.shape[1::2], local.dtype, local.device, placement)


def _empty_like(state: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """Memory for so many sequences and positions, sharded as these keys or values are."""
    local = _local(state)
    if state.dim() != 4 or local.shape[0] != state.shape[0] or local.shape[2] != state.shape[2]:
        raise UnsupportedCache(f"keys and values of shape {tuple(state.shape)} are {tuple(local.shape)} on this rank")
    empty = local.new_empty(rows, local.shape[1], capacity, local.shape[3])
    if not isinstance(state, ShardedTensor):
        return empty
    return ShardedTensor(empty, spec_of(state), (rows, state.shape[1], capacity, state.shape[3]))


def _copy(state: torch.Tensor, start: int, end: int, batch: int) -> torch.Tensor:
    """A copy of these positions of keys or values."""
    local = _local(state)[:batch, :, start:end].clone()
    if not isinstance(state, ShardedTensor):
        return local
    return ShardedTensor(local, spec_of(state), (batch, state.shape[1], end - start, state.shape[3]))
