"""Recording a compiled program as a CUDA graph, and replaying it.

Launching a decoding step kernel by kernel takes the host longer than the kernels take. A recording launches them all at
once, but with the addresses they had: of the weights, of the caches that are written to, of everything else the program
reads. What stays the same object from call to call is used where it is; what does not (the token) is copied to a fixed
place first; what a recording computes is copied out of it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

LIVE = 4
"""Recordings that a program keeps at a time: one for each set of caches in use."""

_pools: dict[int, Any] = {}


def pool_of(owner: object) -> Any:
    """The memory that all recordings for ``owner`` share: they run one after the other."""
    if id(owner) not in _pools:
        _pools[id(owner)] = torch.cuda.graph_pool_handle()
    return _pools[id(owner)]


def copies_of(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copies of tensors of one dtype, in as few launches as possible: a prompt leaves two tensors per layer."""
    if len(tensors) < 2 or tensors[0].dtype == torch.bool:
        return [x.clone() for x in tensors]
    return torch._foreach_mul(tensors, 1)  # what copies many tensors copies them one by one


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


class CUDAGraphReplay:
    """One recorded run of a program."""

    def __init__(
        self,
        program: Callable[..., Any],
        shards: list[torch.Tensor],
        inputs: list[Any],
        kept: list[int],
        numbers: list[int],
        pool: Any,
    ) -> None:
        """``kept`` are the positions of the inputs that are used where they are, ``numbers`` of those on the host."""
        self.kept = kept
        self.objects = [weakref.ref(inputs[i]) for i in kept]
        self.places = addresses(shards) + addresses([inputs[i] for i in kept])
        with torch.inference_mode(False), torch.no_grad():  # to be written to in any mode
            self.copies = {i: x.clone() for i, x in enumerate(inputs) if i not in (*kept, *numbers)}
            self.single = list(self.copies)
            # 16 bytes apart, as compiled kernels expect it
            self.numbers = torch.zeros(len(numbers), 2, dtype=torch.int64, device=shards[0].device)[:, 0]
            self.copies.update(zip(numbers, self.numbers.unbind(), strict=True))
        self.together = numbers
        self.filled: torch.Tensor | None = None
        given = [self.copies.get(i, x) for i, x in enumerate(inputs)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.results = program(*shards, *given)
        fixed = {_storage(x) for x in (*shards, *(inputs[i] for i in kept))}
        own = {_storage(x) for x in self.copies.values()}
        tensors = [(i, x) for i, x in enumerate(self.results) if isinstance(x, torch.Tensor)]
        leaving: dict[torch.dtype, list[int]] = {}
        for i, x in tensors:
            if _storage(x) not in fixed:
                leaving.setdefault(x.dtype, []).append(i)
        self.leaving = list(leaving.values())
        if any(_storage(x) in own or not x.is_cuda for _, x in tensors):
            raise ValueError("a result is the memory of an input that changes")

    @property
    def alive(self) -> bool:
        return all(ref() is not None for ref in self.objects)

    def fits(self, shards: list[torch.Tensor], inputs: list[Any]) -> bool:
        """Whether everything is where it was."""
        here = [inputs[i] for i in self.kept]
        if not all(ref() is x for ref, x in zip(self.objects, here, strict=True)):
            return False
        return addresses(shards) + addresses(here) == self.places

    def replay(self, inputs: list[Any]) -> list[Any]:
        for i in self.single:
            self.copies[i].copy_(inputs[i])
        if self.together:  # how far each layer's cache is filled: of new ones, the same as ever
            filled = torch.stack([inputs[i] for i in self.together])
            if self.filled is None or not torch.equal(filled, self.filled):
                self.numbers.copy_(filled, non_blocking=True)  # memory that is not pinned is read at once
                self.filled = filled
        self.graph.replay()
        results = list(self.results)
        for positions in self.leaving:
            for i, copy in zip(positions, copies_of([results[i] for i in positions]), strict=True):
                results[i] = copy
        return results


class CUDAGraphRunner:
    """A program that is recorded when it is called again with the same caches, and replayed from then on.

    Ranks decide alike when to record, since they go by which objects they are called with and not by where an
    allocator has put them: some communication libraries all_gather_object addresses when they are recorded.
    """

    def __init__(self, program: Callable[..., Any], written: Sequence[int], numbers: Sequence[int], pool: Any) -> None:
        """``written`` are the positions, among the inputs, of those that the program writes to, ``numbers`` of those
        that come on the host and are taken on the device."""
        self.program, self.written, self.numbers, self.pool = program, list(written), list(numbers), pool
        self.recordings: list[CUDAGraphReplay] = []
        self.possible = True
        self._last: list[Any] = []

    def __call__(self, shards: list[torch.Tensor], inputs: list[Any]) -> Any:
        for recording in self.recordings:
            if recording.fits(shards, inputs):
                return recording.replay(inputs)
        if not self.possible:
            return self._run(shards, inputs)
        kept = [i for i, ref in enumerate(self._last) if ref is not None and ref() is inputs[i]]
        self._last = [weakref.ref(x) if isinstance(x, torch.Tensor) else None for x in inputs]
        for i in self.numbers:
            self._last[i] = None  # counted up in place
        if not kept or not set(self.written) <= set(kept):
            return self._run(shards, inputs)
        if not all(isinstance(x, torch.Tensor) and (x.is_cuda or i in self.numbers) for i, x in enumerate(inputs)):
            self.possible = False
            return self._run(shards, inputs)
        return self._record(shards, inputs, kept)

    def _run(self, shards: list[torch.Tensor], inputs: list[Any]) -> Any:
        return self.program(*shards, *on_device(inputs, self.numbers, shards[0].device))

    def _record(self, shards: list[torch.Tensor], inputs: list[Any], kept: list[int]) -> Any:
        self.recordings = [r for r in self.recordings if r.alive][: LIVE - 1]
        try:
            recording = CUDAGraphReplay(self.program, shards, inputs, kept, self.numbers, self.pool)
        except (RuntimeError, ValueError) as error:
            self.possible = False
            logging.getLogger("paraxis").info("not recorded as a CUDA graph: %s", error)
            return self._run(shards, inputs)
        self.recordings.insert(0, recording)
        return recording.replay(inputs)


def on_device(inputs: list[Any], numbers: list[int], device: torch.device | None) -> list[Any]:
    """The inputs, with those at the positions ``numbers`` moved to the device, in one copy."""
    if not numbers:
        return inputs
    moved = torch.stack([inputs[i] for i in numbers]).to(device).unbind()
    result = list(inputs)
    for i, number in zip(numbers, moved, strict=True):
        result[i] = number
    return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
