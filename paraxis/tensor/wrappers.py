"""Data-parallel wrappers of torch around a parallel model: refused when they are constructed.

DDP averages the parameters and gradients of its ranks, FSDP shards them, and ``nn.DataParallel`` copies them to other
devices. On shards all three would be silently wrong. Nothing of torch is replaced:

- DDP and ``DataParallel`` register the module as a child, so torch's own hook for registrations sees them. A wrapper
  around another module that contains a parallel one is found too.
- ``FullyShardedDataParallel`` asks each parameter whether it is flattened already (:class:`.ShardedTensor` answers).
- ``fully_shard`` looks for its name in the registry of the module, which says no here.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..compat.distributed import REFUSED_BY_REGISTRY, set_composable_registry
from ..errors import WrapperError
from .sharded_tensor import ShardedTensor

_WRAPPERS = (DistributedDataParallel, DataParallel)
_installed: list[Any] = []
"""The handle of the hook, once it is registered."""


class RefusingRegistry(dict[str, Any]):
    """What torch notes of composable wrappers of a module. Looking up a data-parallel one is an error."""

    module: str = "this module"

    def __contains__(self, name: object) -> bool:
        if name in REFUSED_BY_REGISTRY:
            raise WrapperError(str(name), f"{self.module} of a parallel model")
        return super().__contains__(name)


def refuse_wrappers(model: nn.Module) -> None:
    """Make data-parallel wrappers refuse this model, each of its modules, and modules that contain it."""
    if not _installed:
        _installed.append(register_module_module_registration_hook(_refuse_child))
    for name, module in model.named_modules():
        registry = RefusingRegistry()
        registry.module = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        set_composable_registry(module, registry)


def _refuse_child(wrapper: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called by torch before it registers a child of any module."""
    if isinstance(wrapper, _WRAPPERS) and child is not None:
        sharded = [key for key, p in child.named_parameters() if isinstance(p, ShardedTensor)]
        if sharded:
            raise WrapperError(type(wrapper).__name__, f"{type(child).__name__} ({sharded[0]!r} is sharded)")
