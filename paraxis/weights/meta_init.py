"""Models on the meta device: building them, and replacing their parameters by empty sharded ones with metadata.

A model is first built under :class:`MetaAwareMethodsPatcher`: its parameters are on ``meta``, its buffers are real.
:func:`attach_parameter_meta` then makes every parameter an *empty* sharded tensor: global shape, no elements, and a
:class:`~paraxis.tensor.parameter_meta.ParameterMeta` that the plan fills in. Loading or initializing sets its shard.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..compat.torch import is_traceable_wrapper_subclass, make_subclass, mark_as_parameter
from ..compat.transformers import initialize_weights_slot
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor

_Register = Callable[[nn.Module, str, "nn.Parameter | None"], None]

# No buffer is this large; a parameter may be, and may exceed the machine's memory: such a tensor is never allocated.
_LARGE = 1 << 30

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
_FILLS = {
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    torch.Tensor.fill_,
    torch.Tensor.zero_,
    torch.Tensor.copy_,
    torch.Tensor.mul_,
    torch.Tensor.add_,
    torch.Tensor.clamp_,
    torch.Tensor.erfinv_,
}


class _NoParameterMemory(TorchFunctionMode):
    """Skips filling meta tensors, and creates very large tensors on ``meta`` right away."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        if func in _FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            if _size_in_bytes(args, kwargs) >= _LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _size_in_bytes(args: Any, kwargs: Any) -> int:
    size = kwargs.get("size", args)
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = size[0]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not all(isinstance(n, int) for n in size):
        return 0  # a symbolic size, or an error that the call itself will report
    return prod(size) * dtype.itemsize


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """The parameter on ``meta`` that stands for ``param``: the same one each time, so that ties survive."""
    known: Any = param.__dict__.get("_on_meta")
    if known is None:
        # `make_subclass` preserves the class of the parameter without calling its constructor.
        data = torch.empty_like(param.data, device="meta")
        known = make_subclass(type(param), data, param.requires_grad)
        known.__dict__.update(param.__dict__)
        param.__dict__["_on_meta"] = known
    return known


class MetaAwareMethodsPatcher:
    """A context under which modules are built with parameters on ``meta`` and real buffers.

    A parameter is moved to ``meta`` when a module registers it, so at most one at a time has memory, and that of
    ``torch.empty`` is never touched. Everything else that a constructor computes stays real: the frequencies of a
    rotary embedding, a mask, a list of sizes read with ``.item()``. That differs from ``torch.device("meta")``.

    Weights are not initialized (they have no memory); of modules with buffers, only the buffers are.

    The context may be nested and entered from several threads: only modules built in a thread that is inside it are
    changed, and the last one to exit undoes the patches, with or without exceptions.
    """

    _lock = threading.RLock()
    _users = 0
    _undo: list[tuple[Any, str, Any]] = []  # shared by all instances
    _thread = threading.local()

    def __enter__(self) -> MetaAwareMethodsPatcher:
        cls = MetaAwareMethodsPatcher
        with cls._lock:
            if cls._users == 0:
                cls._patch_all()
            cls._users += 1
        stack = cls._thread.__dict__.setdefault("modes", [])
        stack.append(_NoParameterMemory())
        stack[-1].__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        cls = MetaAwareMethodsPatcher
        cls._thread.modes.pop().__exit__(*exc)
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                while cls._undo:
                    setattr(*cls._undo.pop())

    @classmethod
    def _active(cls) -> bool:
        return bool(getattr(cls._thread, "modes", None))

    @classmethod
    def _patch(cls, owner: Any, name: str, replacement: Any) -> None:
        cls._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    @classmethod
    def _patch_all(cls) -> None:
        cls._patch(nn.Module, "register_parameter", cls._registering(nn.Module.register_parameter))
        # Deterministic mode fills the results of `torch.empty`, which would touch the memory of every parameter.
        cls._patch(torch.utils.deterministic, "fill_uninitialized_memory", False)
        if "transformers" in sys.modules:
            owner, name = initialize_weights_slot()
            cls._patch(owner, name, cls._initializing(getattr(owner, name)))

    @classmethod
    def _registering(cls, register: _Register) -> _Register:
        @functools.wraps(register)
        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if param is None or not cls._active() or param.is_meta:
                return
            if not is_lazy(param) and not is_traceable_wrapper_subclass(param):
                module._parameters[name] = _on_meta(param)

        return register_parameter

    @classmethod
    def _initializing(cls, initialize: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(initialize)
        def initialize_weights(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if not cls._active() or module._buffers:
                initialize(self, module, *args, **kwargs)

        return initialize_weights


# -- parameter metadata --------------------------------------------------------------------------------------


def _names_by_parameter(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[str]]]:
    """Every parameter once, with all of its names, in the order of the model."""
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for key, param in params.items():
        yield param, names[key]


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For each parameter that has several names: its first name, and all of them."""
    return {names[0]: names for _, names in _names_by_parameter(model) if len(names) > 1}


def parameter_meta(param: nn.Parameter) -> ParameterMeta | None:
    """The metadata of ``param``; ``None`` for a parameter that Paraxis does not manage."""
    return getattr(param, "meta_info", None)


def initialize_parameter_meta(model: nn.Module) -> None:
    """Attach a :class:`ParameterMeta` to every parameter that has none, as ``param.meta_info``."""
    for param, names in _names_by_parameter(model):
        if parameter_meta(param) is None:
            param.meta_info = ParameterMeta(  # type: ignore[attr-defined]
                name=names[0],
                shape=tuple(param.shape),
                dtype=param.dtype,
                is_tied=len(names) > 1,
                need_initialize=True,
            )


def attach_parameter_meta(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, nn.Parameter]:
    """Turn every parameter into an empty sharded one on ``device``, and move the buffers there.

    The values of a parameter with memory become ``meta_info.source``, to be sliced once the plan is known. A parameter
    with several names stays one object. Another call changes only the device or the group.

    Returns:
        The parameters by their first names.
    """
    device = torch.device(device)
    _move_buffers(model, device)
    initialize_parameter_meta(model)
    params: dict[str, nn.Parameter] = {}
    for param, names in list(_names_by_parameter(model)):
        meta = parameter_meta(param)
        assert meta is not None
        if group is not None:
            meta.group = group
        if not isinstance(param, ShardedTensor):
            meta.source = None if param.is_meta else param.detach()
        if not isinstance(param, ShardedTensor) or not _same_device(param.device, device):
            local = param.local if isinstance(param, ShardedTensor) else torch.empty(0, dtype=meta.dtype)
            param = _empty_parameter(local.to(device), meta, param.requires_grad)
            for name in names:
                owner, _, leaf = name.rpartition(".")
                # Not through `_parameters`: modules such as RNNs update a list of their own in `__setattr__`.
                setattr(model.get_submodule(owner), leaf, param)
        params[names[0]] = param
    return params


def move_model_to_device(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to ``device``, and replace the parameters by empty ones there until they are loaded."""
    attach_parameter_meta(model, device)


def _empty_parameter(local: torch.Tensor, meta: ParameterMeta, requires_grad: bool) -> Any:
    """A parameter around a sharded tensor. ``nn.Parameter(...)`` would detach it and lose the metadata."""
    param: Any = ShardedTensor(local, meta, meta.shape, requires_grad=requires_grad)
    mark_as_parameter(param)
    param.meta_info = meta
    return param


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (b.index is None or a.index == b.index)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or _same_device(buffer.device, device):
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"buffer `{path + '.' if path else ''}{name}` is on meta: its values were never "
                    "computed. Build the model under `MetaAwareMethodsPatcher`, which computes buffers; "
                    "a buffer that is computed from a parameter needs a model built with real weights."
                )
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            module._buffers[name] = moved[id(buffer)]
