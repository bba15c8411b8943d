"""Measuring what a computation allocates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate while it is active.

    ``live`` is what is allocated now, ``peak`` its maximum so far, ``largest`` the largest single storage. Storages
    that existed before do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, new=False)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, new=True)
        return result

    def _note(self, tensor: torch.Tensor, new: bool) -> None:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return  # a wrapper subclass: its inner tensors are seen when operators run on them
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if new else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
