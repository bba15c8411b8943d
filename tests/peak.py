"""Measuring what a computation allocates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """While active: the bytes of storages that operators make, most at one time (``peak``), and the ``largest``."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for tensor in given:  # what was there before does not count
            self._note(tensor, made=False)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, made=True)
        return result

    def _note(self, tensor: torch.Tensor, made: bool) -> None:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return  # a wrapper: its parts are seen when operators run on them
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if made else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
