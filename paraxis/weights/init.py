"""Weights that no checkpoint provides."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.consensus import all_gather_object
from ..distributed.redistribute import slice_box
from .load import _finish, _meta_of, held


def initialize_parameters(
    params: Mapping[str, nn.Parameter],
    init_fn: Callable[[torch.Tensor], Any],
    seed: int,
    rank: int,
    device: torch.device,
) -> None:
    """Initialize every parameter that still needs it (``meta_info.need_initialize``).

    The same seed gives the same *global* weights on any number of ranks: each parameter's whole tensor is
    made on the CPU, one at a time, from a seed of its own (drawn from ``seed`` and its name), and each rank
    keeps its part. The caller's random state is left as it was.

    Which values: a parameter's own ``meta_info.init_fn`` if it has one. Else ``init_fn`` for those with two
    or more dimensions (linear, embedding and convolution weights), zeros for those whose name ends in
    ``bias``, and ones for all others, which are the weights of norms.

    Args:
        params: Planned sharded parameters by name.
        init_fn: Fills the tensor it is given, as ``functools.partial(nn.init.normal_, std=0.02)`` does.
        seed: The seed, the same on all ranks; see :func:`common_seed`.
        rank: This process's rank.
        device: Where the shards go.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for param in params.values():
            meta = _meta_of(param)
            if not meta.need_initialize:
                continue
            torch.manual_seed(_seed_of(meta.name, seed))
            whole = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
            _fill(whole, meta.name, meta.init_fn, init_fn)
            part = slice_box(whole, *held(meta, rank))
            shard = torch.empty(part.shape, dtype=meta.dtype, device=device).copy_(part)
            del whole, part
            _finish(param, meta, shard, rank, None)


def common_seed(seed: int | None, group: dist.ProcessGroup | None) -> int:
    """``seed``, or torch's current one, as the first rank of ``group`` has it. A collective."""
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


def left_out(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of these parameters that the model says checkpoints need not have (fixed sinusoids, for example)."""
    fields = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save")
    patterns = [pattern for field in fields for pattern in (getattr(model, field, None) or ())]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def new_head(model: nn.Module, absent: list[str], stored: set[str]) -> list[str]:
    """Those of the absent parameters that lie outside the base model, if the checkpoint has all of that and no more.

    That is how a pretrained model gets a new head. If anything of the base model is absent, or a part of the head is
    there, the checkpoint is not complete.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '') or ' '}."
    optional = set(left_out(model, absent))
    outside = [name for name in absent if not name.startswith(prefix) and name not in optional]
    inside = [name for name in absent if name.startswith(prefix) and name not in optional]
    if inside or not outside or not stored or any(not name.startswith(prefix) for name in stored):
        return []
    return outside


def as_the_model_does(model: Any, name: str) -> Callable[[torch.Tensor], Any]:
    """A function that fills a tensor with what the model's own initialization gives the parameter of this name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)

    def fill(tensor: torch.Tensor) -> None:
        stand_in = copy.copy(module)
        own = {key: None if p is None else nn.Parameter(torch.empty(p.shape)) for key, p in module._parameters.items()}
        stand_in.__dict__["_parameters"] = own
        model._init_weights(stand_in)
        tensor.copy_(own[leaf])  # type: ignore[arg-type]

    return fill
