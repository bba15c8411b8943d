"""Gradients averaged over data-parallel ranks that all keep the same parameters.

Gradients arrive one by one while the backward pass runs. They are put into buckets, in the order in which they come
first, and a bucket is averaged as soon as all of it is there, while the backward pass goes on. Every rank averages
every bucket once, in the same order, whatever its own backward pass has met: where a rank has no gradient for a
parameter, it takes part with zeros, and gets one if another rank has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.collectives import all_reduce
from ..distributed.shared_memory import shared_memory_of
from ..errors import CollectiveError

BUCKET = 25 << 20
"""Bytes of gradients that are averaged together."""
UNDER_WAY = 2
"""Buckets that may be on their way: each takes the memory of its gradients once more."""

Local = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    missing: set[int] = field(default_factory=set)
    """Those whose gradient has not arrived, by identity."""
    finish: Callable[[], torch.Tensor] | None = None
    """Gives the averages, once they are asked for."""


class GradReducer:
    """Averages the gradients of parameters over a group at the end of every backward pass.

    Args:
        group: The data-parallel ranks.
        local: From a gradient to the tensor in which this rank has it.
        make: From a parameter and such a tensor to a gradient, where a rank has none and another has.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: Local,
        make: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
    ) -> None:
        self.group, self.world, self._local, self._make = group, dist.get_world_size(group), local, make
        self._known: list[weakref.ref[nn.Parameter]] = []  # weak, since parameters have hooks that know this
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._pass = -1
        self._paused = False

    def add(self, parameter: nn.Parameter) -> None:
        """Average the gradients of this parameter, too, whenever it is trained."""
        if not parameter.dtype.is_floating_point or any(parameter is known() for known in self._known):
            return
        self._known.append(weakref.ref(parameter))
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # one that is frozen may be trained later
        parameter.register_post_accumulate_grad_hook(self._arrived)
        parameter.requires_grad_(trained)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients as they are; the next backward pass outside averages what has been added up."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._paused:
            return
        current = torch._C._current_graph_task_id()
        if current != self._pass:  # the first one of a backward pass; the last may have failed half-way
            self._begin(current)
        for bucket in self._buckets[self._next :]:
            bucket.missing.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start(self._buckets[self._next])

    def _begin(self, current: int) -> None:
        self._pass, self._next = current, 0
        known = [known() for known in reversed(self._known)]
        self._buckets = self._in_buckets([p for p in known if p is not None and p.requires_grad])
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _in_buckets(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        """In this order, those of one dtype together; the last layers come first, as their gradients do."""
        buckets: list[_Bucket] = []
        filling: dict[torch.dtype, tuple[_Bucket, int]] = {}
        for parameter in parameters:
            bucket, size = filling.get(parameter.dtype, (None, BUCKET))
            if bucket is None or size >= BUCKET:
                bucket, size = _Bucket([]), 0
                buckets.append(bucket)
            bucket.parameters.append(parameter)
            bucket.missing.add(id(parameter))
            filling[parameter.dtype] = bucket, size + self._local(parameter).nbytes
        return buckets

    def _start(self, bucket: _Bucket) -> None:
        """Begin to average a bucket. Behind the gradients comes a number for each: whether there is one."""
        self._next += 1
        pieces, have = [], []
        for parameter in bucket.parameters:
            held, gradient = self._local(parameter), parameter.grad
            have.append(float(gradient is not None))
            pieces.append((torch.zeros_like(held) if gradient is None else self._local(gradient)).reshape(-1))
        flags = torch.tensor(have, dtype=pieces[0].dtype, device=pieces[0].device)
        bucket.finish = self._sum(torch.cat([*pieces, flags]).div_(self.world))
        if self._next > UNDER_WAY:
            self._finish(self._buckets[self._next - 1 - UNDER_WAY])

    def _sum(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self.world == 1:
            return lambda: flat
        if (
            flat.device.type == "cpu"
            and dist.get_backend(self.group) == "gloo"
            and shared_memory_of(self.group) is not None
        ):
            summed = all_reduce(flat, self.group)
            return lambda: summed
        work: Any = dist.all_reduce(flat, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            try:
                work.wait()
            except RuntimeError as error:
                raise CollectiveError(
                    f"averaging gradients over {self.world} data-parallel ranks failed: {error}. A rank has died, or "
                    "the ranks do not train alike; look for the first error on the others."
                ) from error
            return flat

        return wait

    @torch.no_grad()
    def _finish(self, bucket: _Bucket) -> None:
        """Put the averages of a bucket where the gradients are, once."""
        if bucket.finish is None:
            return
        averaged, bucket.finish = bucket.finish(), None
        flags = averaged[averaged.numel() - len(bucket.parameters) :]
        start = 0
        for i, parameter in enumerate(bucket.parameters):
            held = self._local(parameter)
            mean = averaged[start : start + held.numel()].view(held.shape)
            start += held.numel()
            if parameter.grad is not None:
                self._local(parameter.grad).copy_(mean)
            elif float(flags[i]):
                parameter.grad = self._make(parameter, mean.clone())

    def _end(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        for bucket in self._buckets:
            self._finish(bucket)
        self._buckets, self._pass = [], -1
