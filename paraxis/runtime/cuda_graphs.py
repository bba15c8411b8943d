"""Capturing a compiled program as a CUDA graph, and replaying it.

Launching a decode step kernel by kernel takes the host longer than the kernels take. A CUDA graph launches them all at
once, but with the addresses of the capture: of the weights, of the KV caches that are written to, of everything else
the program reads. Inputs that are the same object from call to call are *static*: the graph uses them where they are.
The others (the token) are copied to a buffer of the graph before every replay. Results are copied out of the graph's
memory after it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..compat.torch import foreach_mul
from ..context import ParallelExecutionCtx
from ..tensor.quantized import plain_tensors
from ..tensor.sharded_tensor import shards_version
from .early_launch import EarlyLaunches

LIVE_GRAPHS = 4
"""Graphs that a program holds at a time: one for each set of caches in use."""
MAX_COPIED = 1 << 20
"""Bytes that are copied for every replay of a graph none of whose inputs stays the same."""


def pool_of(ctx: ParallelExecutionCtx) -> Any:
    """The memory pool that all graphs of a context share, since they never run at the same time."""
    if ctx.state.graph_pool is None:
        ctx.state.graph_pool = torch.cuda.graph_pool_handle()
    return ctx.state.graph_pool


class CUDAGraphReplay:
    """One capture of a program.

    Args:
        program: Called with the shards of the parameters, then with the inputs.
        shards: The shards; static.
        inputs: The inputs of the call that is captured.
        static: Positions of the inputs that are static.
        scalars: Positions of the inputs that are scalars on the host. They have one buffer together.
        pool: The memory pool, by :func:`pool_of`.

    Raises:
        ValueError: A result is the memory of an input that is copied, or is on another device.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        shards: list[torch.Tensor],
        inputs: list[Any],
        static: list[int],
        scalars: list[int],
        pool: Any,
    ) -> None:
        device = shards[0].device
        self.static, self.scalars = static, scalars
        self._objects = [weakref.ref(inputs[i]) for i in static]
        self._addresses = _addresses(shards) + _addresses([inputs[i] for i in static])
        with torch.inference_mode(False), torch.no_grad():  # buffers that can be written to in any mode
            self._buffers = {i: x.clone() for i, x in enumerate(inputs) if i not in (*static, *scalars)}
            self._copied = list(self._buffers)
            # 16 bytes apart, as compiled kernels expect it
            self._scalars = torch.zeros(len(scalars), 2, dtype=torch.int64, device=device)[:, 0]
            self._buffers.update(zip(scalars, self._scalars.unbind(), strict=True))
        self._last_scalars: torch.Tensor | None = None
        self._version = shards_version()
        arguments = [self._buffers.get(i, x) for i, x in enumerate(inputs)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self._results = program(*shards, *arguments)
        fixed = {_storage(x) for x in plain_tensors((*shards, *(inputs[i] for i in static)))}
        buffers = {_storage(x) for x in self._buffers.values()}
        tensors = [(i, x) for i, x in enumerate(self._results) if isinstance(x, torch.Tensor)]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, x in tensors:
            if _storage(x) not in fixed:
                by_dtype.setdefault(x.dtype, []).append(i)
        self._to_copy = list(by_dtype.values())
        if any(_storage(x) in buffers or x.device != device for _, x in tensors):
            raise ValueError("a result is the memory of an input that changes")

    @property
    def alive(self) -> bool:
        """Whether all static inputs still exist: otherwise no call can match this graph any more."""
        return all(ref() is not None for ref in self._objects)

    def matches(self, shards: list[torch.Tensor], inputs: list[Any]) -> bool:
        """Whether the static inputs are the same objects, and everything has the address that it had."""
        here = [inputs[i] for i in self.static]
        if not all(ref() is x for ref, x in zip(self._objects, here, strict=True)):
            return False
        if _addresses(shards) + _addresses(here) != self._addresses:
            return False
        self._version = shards_version()
        return True

    def replay(self, inputs: list[Any]) -> list[Any]:
        """Run the graph on the inputs of a matching call."""
        for i in self._copied:
            self._buffers[i].copy_(inputs[i])
        if self.scalars:  # how many positions of each layer's cache are in use: for new caches always the same
            scalars = torch.stack([inputs[i] for i in self.scalars])
            if self._last_scalars is None or not torch.equal(scalars, self._last_scalars):
                self._scalars.copy_(scalars, non_blocking=True)  # memory that is not pinned is read at once
                self._last_scalars = scalars
        self.launch()
        return self.results()

    def launch(self) -> None:
        """Run the graph on the inputs that its buffers have."""
        self.graph.replay()

    def results(self) -> list[Any]:
        """What it has returned, in memory that the next launch leaves alone."""
        results = list(self._results)
        for positions in self._to_copy:
            for i, copy in zip(positions, _copies([results[i] for i in positions]), strict=True):
                results[i] = copy
        return results

    # -- launches before the call is prepared (:mod:`.early_launch`) ---------------------------------------------

    def launchable(self) -> bool:
        """Whether everything that the graph reads is where it was, so that it can run whoever calls it."""
        here = [ref() for ref in self._objects]
        return (
            self._version == shards_version()  # the program that this graph belongs to holds the shards
            and all(x is not None for x in here)
            and _addresses(here) == self._addresses[len(self._addresses) - len(here) :]  # type: ignore[arg-type]
        )

    def put(self, position: int, value: torch.Tensor) -> None:
        """Copy the input at this position to its buffer."""
        self._buffers[position].copy_(value)

    def has(self, inputs: list[Any]) -> bool:
        """Whether the buffers have the values of these inputs. Waits for the current stream."""
        if self.scalars:
            scalars = torch.stack([inputs[i] for i in self.scalars])
            if self._last_scalars is None or not torch.equal(scalars, self._last_scalars):
                return False
        equal = [(self._buffers[i] == inputs[i]).all() for i in self._copied]
        return not equal or bool(torch.stack(equal).all())

    def position_of(self, value: torch.Tensor, inputs: list[Any]) -> int | None:
        """The input with this value that is copied to a buffer."""
        for i in self._copied:
            if inputs[i].shape == value.shape and inputs[i].dtype == value.dtype and torch.equal(inputs[i], value):
                return i
        return None


class CUDAGraphRunner:
    """A program that is captured when it is called again with the same caches, and replayed from then on.

    All ranks capture in the same call: they go by the objects they are called with and not by addresses, which an
    allocator chooses. Some communication libraries exchange addresses between the ranks during capture.

    Args:
        program: Called with the shards of the parameters, then with the inputs.
        written: Positions of the inputs that the program writes to: KV caches.
        scalars: Positions of the inputs that come as scalars on the host and are used on the device.
        pool: The memory pool, by :func:`pool_of`.
        early: What launches graphs before they are called for.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        written: Sequence[int],
        scalars: Sequence[int],
        pool: Any,
        early: EarlyLaunches | None = None,
    ) -> None:
        self.program, self.written, self.scalars, self.pool = program, list(written), list(scalars), pool
        self.early = early
        self.graphs: list[CUDAGraphReplay] = []
        self.capturable = True
        self._last: list[Any] | None = None

    def __call__(self, shards: list[torch.Tensor], inputs: list[Any]) -> Any:
        """Replay the graph of these inputs; capture one, if the call before had the same caches; or just run: also as
        part of what somebody else captures."""
        if torch.cuda.is_current_stream_capturing():
            return self._run(shards, inputs)
        graph = next((graph for graph in self.graphs if graph.matches(shards, inputs)), None)
        if graph is None and (static := self._static(shards, inputs)) is not None:
            graph = self._capture(shards, inputs, static)
        if graph is None:
            if self.early is not None:
                self.early.settle()
            return self._run(shards, inputs)
        if self.early is not None and self.early.take(graph, inputs, writes=bool(self.written)):
            return graph.results()
        return graph.replay(inputs)

    def _static(self, shards: list[torch.Tensor], inputs: list[Any]) -> list[int] | None:
        """Positions of the inputs that were the same in the call before, if this call is to be captured."""
        if not self.capturable:
            return None
        last, self._last = self._last, [weakref.ref(x) if isinstance(x, torch.Tensor) else None for x in inputs]
        for i in self.scalars:
            self._last[i] = None  # updated in place
        if last is None or not getattr(self.program, "ready", True):
            return None
        static = [i for i, ref in enumerate(last) if ref is not None and ref() is inputs[i]]
        if not set(self.written) <= set(static) or not (static or _bytes(inputs) <= MAX_COPIED):
            return None
        self.capturable = self._is_capturable(inputs, shards[0].device)
        return static if self.capturable else None

    def _is_capturable(self, inputs: list[Any], device: torch.device) -> bool:
        """Whether all inputs are tensors on the device, or scalars that are moved there."""
        scalars = self.scalars
        return all(isinstance(x, torch.Tensor) and (x.device == device or i in scalars) for i, x in enumerate(inputs))

    def _run(self, shards: list[torch.Tensor], inputs: list[Any]) -> Any:
        return self.program(*shards, *on_device(inputs, self.scalars, shards[0].device))

    def _capture(self, shards: list[torch.Tensor], inputs: list[Any], static: list[int]) -> CUDAGraphReplay | None:
        self.graphs = [graph for graph in self.graphs if graph.alive][: LIVE_GRAPHS - 1]
        if self.early is not None:
            self.early.settle()  # graphs share memory
        try:
            graph = CUDAGraphReplay(self.program, shards, inputs, static, self.scalars, self.pool)
        except (RuntimeError, ValueError) as error:
            self.capturable = False
            logging.getLogger("paraxis").info("not captured as a CUDA graph: %s", error)
            return None
        self.graphs.insert(0, graph)
        return graph


def on_device(inputs: list[Any], scalars: list[int], device: torch.device | None) -> list[Any]:
    """The inputs, with those at the positions ``scalars`` moved to the device, in one copy."""
    if not scalars:
        return inputs
    moved = torch.stack([inputs[i] for i in scalars]).to(device).unbind()
    result = list(inputs)
    for i, scalar in zip(scalars, moved, strict=True):
        result[i] = scalar
    return result


def _copies(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copies of tensors of one dtype in as few launches as possible: a prefill returns two tensors per layer."""
    if len(tensors) < 2 or tensors[0].dtype == torch.bool:
        return [x.clone() for x in tensors]
    return foreach_mul(tensors, 1)  # type: ignore[no-any-return]  # a foreach copy launches a kernel per tensor


def _bytes(inputs: Sequence[Any]) -> int:
    return sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, plain_tensors(tensors)))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
