"""Gradient reduction for replicated parameters (DDP): buckets are all-reduced while the backward pass runs.

Gradients arrive one by one. They are assigned to buckets in the reverse order of the parameters, and a bucket is
reduced as soon as it is complete, overlapping with the rest of the backward pass. Every rank reduces every bucket once,
in the same order, whichever parameters its own batch has used: a rank without a gradient for a parameter contributes
zeros, and receives a gradient if another rank has one.
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

from ..compat.torch import after_backward, current_graph_task
from ..distributed.collectives import all_reduce
from ..distributed.shared_memory import shared_memory_of
from ..errors import CollectiveError

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that are reduced by one all-reduce."""
MAX_IN_FLIGHT = 2
"""Buckets that may be in flight: each takes the memory of its gradients a second time."""

Local = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Bucket:
    """Parameters of one dtype whose gradients are reduced together."""

    parameters: list[nn.Parameter]
    missing: set[int] = field(default_factory=set)
    """Parameters whose gradient has not arrived, by identity."""
    wait: Callable[[], torch.Tensor] | None = None
    """Waits for the all-reduce and returns the flat means; None before it is launched and after it is copied back."""


class GradReducer:
    """Reduces the gradients of parameters to their mean over a group, in every backward pass.

    Args:
        group: The data-parallel ranks.
        local: From a parameter or gradient to this rank's local tensor.
        make: From a parameter and a local tensor to a gradient, for a rank that has none where another rank has one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: Local,
        make: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
    ) -> None:
        self.group, self.world, self._local, self._make = group, dist.get_world_size(group), local, make
        self._parameters: list[weakref.ref[nn.Parameter]] = []  # weak: hooks of the parameters refer to this object
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._graph_task = -1
        self._paused = False

    def add(self, parameter: nn.Parameter) -> None:
        """Reduce the gradients of this parameter, too, whenever it is trained."""
        if not parameter.dtype.is_floating_point or any(parameter is known() for known in self._parameters):
            return
        self._parameters.append(weakref.ref(parameter))
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter may be trained later
        parameter.register_post_accumulate_grad_hook(self._on_gradient)
        parameter.requires_grad_(trained)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, gradients accumulate locally; the next backward pass outside reduces their sum."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._paused:
            return
        current = current_graph_task()
        if current != self._graph_task:  # the first gradient of a backward pass; the previous pass may have failed
            self._begin(current)
        for bucket in self._buckets[self._next :]:
            bucket.missing.discard(id(parameter))
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch(self._buckets[self._next])

    def _begin(self, current: int) -> None:
        self._graph_task, self._next = current, 0
        known = [known() for known in reversed(self._parameters)]
        self._buckets = self._make_buckets([p for p in known if p is not None and p.requires_grad])
        after_backward(self._end)

    def _make_buckets(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        """Buckets of one dtype each, in this order: the last layers first, as their gradients arrive."""
        buckets: list[_Bucket] = []
        filling: dict[torch.dtype, tuple[_Bucket, int]] = {}
        for parameter in parameters:
            bucket, size = filling.get(parameter.dtype, (None, BUCKET_BYTES))
            if bucket is None or size >= BUCKET_BYTES:
                bucket, size = _Bucket([]), 0
                buckets.append(bucket)
            bucket.parameters.append(parameter)
            bucket.missing.add(id(parameter))
            filling[parameter.dtype] = bucket, size + self._local(parameter).nbytes
        return buckets

    def _launch(self, bucket: _Bucket) -> None:
        """Launch the all-reduce of a bucket: its gradients, then a flag per parameter that says whether it has one."""
        self._next += 1
        pieces, have = [], []
        for parameter in bucket.parameters:
            local, gradient = self._local(parameter), parameter.grad
            have.append(float(gradient is not None))
            pieces.append((torch.zeros_like(local) if gradient is None else self._local(gradient)).reshape(-1))
        flags = torch.tensor(have, dtype=pieces[0].dtype, device=pieces[0].device)
        bucket.wait = self._all_reduce(torch.cat([*pieces, flags]).div_(self.world))
        if self._next > MAX_IN_FLIGHT:
            self._finish(self._buckets[self._next - 1 - MAX_IN_FLIGHT])

    def _all_reduce(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
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
                    f"reducing gradients over {self.world} data-parallel ranks failed: {error}. A rank has ended, or "
                    "the ranks train different parameters; look for the first error on the others."
                ) from error
            return flat

        return wait

    @torch.no_grad()
    def _finish(self, bucket: _Bucket) -> None:
        """Copy the means of a bucket into the gradients, once."""
        if bucket.wait is None:
            return
        means, bucket.wait = bucket.wait(), None
        flags = means[means.numel() - len(bucket.parameters) :]
        start = 0
        for i, parameter in enumerate(bucket.parameters):
            local = self._local(parameter)
            mean = means[start : start + local.numel()].view(local.shape)
            start += local.numel()
            if parameter.grad is not None:
                self._local(parameter.grad).copy_(mean)
            elif float(flags[i]):
                parameter.grad = self._make(parameter, mean.clone())

    def _end(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:
            self._finish(bucket)
        self._buckets, self._graph_task = [], -1
