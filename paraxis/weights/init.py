"""Initializing weights that no checkpoint provides."""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.transformers import init_weights_of, keys_to_ignore_on_load, keys_to_ignore_on_save
from ..distributed.consensus import all_gather_object
from ..distributed.redistribute import slice_box
from ..tensor.parameter_meta import ParameterMeta
from .load import _finish, _meta_of, storage_placement
from .partial_recipes import Index
from .quantized.load import load_quantizing
from .quantized.stored import Stored

MAX_ON_DEVICE = 4 << 30
"""Bytes of the largest tensor that is initialized on the device of its shards."""


def initialize_parameters(
    params: Mapping[str, nn.Parameter],
    init_fn: Callable[[torch.Tensor], Any],
    seed: int,
    rank: int,
    device: torch.device,
) -> None:
    """Initialize every parameter that still needs it (``meta_info.need_initialize``).

    The same seed gives the same *global* weights on any number of ranks: each parameter's full tensor is
    initialized, one at a time, from a seed of its own (derived from ``seed`` and its name), and each rank takes its
    shard. That is done on ``device``, which draws other numbers than another type of device, unless the tensor is too
    large for that: then on the CPU. The caller's random state does not change.

    Values come from a parameter's own ``meta_info.init_fn`` if it has one. Else from ``init_fn`` for parameters with
    two or more dimensions (linear, embedding and convolution weights); those whose name ends in ``bias`` are zeros, and
    all others, which are the weights of norms, ones.

    Args:
        params: Planned sharded parameters by name.
        init_fn: Initializes a tensor in place, as ``functools.partial(nn.init.normal_, std=0.02)`` does.
        seed: The seed, the same on all ranks; see :func:`common_seed`.
        rank: This process's rank.
        device: Where the shards go.
    """
    with _forked_rng(device), torch.no_grad():
        for param in params.values():
            meta = _meta_of(param)
            if not meta.need_initialize:
                continue
            full = _initialized(meta, init_fn, seed, device)
            part = slice_box(full, *storage_placement(meta, rank))
            shard = torch.empty(part.shape, dtype=meta.dtype, device=device).copy_(part)
            del full, part
            _finish(param, meta, shard, rank, None)


def initialize_quantized(
    params: Mapping[str, nn.Parameter],
    init_fn: Callable[[torch.Tensor], Any],
    seed: int,
    rank: int,
    device: torch.device,
) -> None:
    """Initialize parameters that are then quantized: each has the values that it has without quantization."""

    def dense(name: str, stored: Stored, index: Index) -> torch.Tensor:
        full = _initialized(_meta_of(params[name]), init_fn, seed, device).cpu()
        full = full.transpose(-1, -2) if stored.format.transposed else full
        for dim, ranges in enumerate(index):
            if ranges != ((0, full.shape[dim]),):
                full = torch.cat([full.narrow(dim, a, b - a) for a, b in ranges], dim)
        return full

    with _forked_rng(device), torch.no_grad():
        load_quantizing(params, dense, rank, device)


def _initialized(
    meta: ParameterMeta, init_fn: Callable[[torch.Tensor], Any], seed: int, device: torch.device
) -> torch.Tensor:
    """The full parameter, from a seed of its own."""
    torch.manual_seed(_seed_of(meta.name, seed))
    large = math.prod(meta.shape) * meta.dtype.itemsize > MAX_ON_DEVICE
    full = torch.empty(meta.shape, dtype=meta.dtype, device="cpu" if large else device)
    _fill(full, meta.name, meta.init_fn, init_fn)
    return full


def _forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Inside, draws do not change the caller's random state."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return torch.random.fork_rng(devices=[index] if device.type == "cuda" else [])


def common_seed(seed: int | None, group: dist.ProcessGroup | None) -> int:
    """``seed``, or torch's current seed, of rank 0 of ``group``. A collective."""
    return int(all_gather_object(group, torch.initial_seed() if seed is None else seed, "choosing a seed")[0])


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _fill(
    tensor: torch.Tensor,
    name: str,
    own: Callable[..., Any] | None,
    default: Callable[[torch.Tensor], Any],
) -> None:
    if own is not None:
        own(tensor)
    elif tensor.ndim >= 2:
        default(tensor)
    elif name.endswith("bias"):
        tensor.zero_()
    else:
        tensor.fill_(1)


def optional_parameters(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that checkpoints of this model need not have (fixed sinusoids, for example)."""
    patterns = [*keys_to_ignore_on_load(model), *keys_to_ignore_on_save(model)]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def new_head_parameters(model: nn.Module, missing: list[str], stored: set[str]) -> list[str]:
    """The missing parameters outside the base model, if the checkpoint has exactly the parameters of the base model.

    That is how a pretrained model gets a new head. If a parameter of the base model is missing, or a part of the head
    is stored, the checkpoint is incomplete, and the result empty.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '') or ' '}."
    optional = set(optional_parameters(model, missing))
    outside = [name for name in missing if not name.startswith(prefix) and name not in optional]
    inside = [name for name in missing if name.startswith(prefix) and name not in optional]
    if inside or not outside or not stored or any(not name.startswith(prefix) for name in stored):
        return []
    return outside


def model_init_fn(model: Any, name: str) -> Callable[[torch.Tensor], Any]:
    """A function that initializes a tensor as the model's own code initializes the parameter ``name``."""
    path, _, leaf = name.rpartition(".")
    module, init_weights = model.get_submodule(path), init_weights_of(model)

    def fill(tensor: torch.Tensor) -> None:
        stand_in = copy.copy(module)
        own = {key: None if p is None else nn.Parameter(torch.empty(p.shape)) for key, p in module._parameters.items()}
        stand_in.__dict__["_parameters"] = own
        init_weights(stand_in)  # type: ignore[misc]
        tensor.copy_(own[leaf])  # type: ignore[arg-type]

    return fill
