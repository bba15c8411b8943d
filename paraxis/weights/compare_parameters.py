"""Comparing parameters and buffers between ranks that must hold the same values.

Tensor-parallel ranks hold the same replicated parameters and buffers; data-parallel ranks hold the same shards. A
program that changes one of them on one rank alone (an ``if rank == 0`` around an assignment) makes the ranks compute
different models, silently. Checksums find it. What they find is compared by value before anybody raises: gradients of
replicated parameters are computed on every rank, and kernels that add in any order may round differently.

The values of a shard that one rank alone holds have nothing to be compared with. For these, the ranks compare how often
each was written to since the model was made: torch counts it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ..context import ParallelExecutionCtx
from ..distributed.checksum import ArgumentSums
from ..distributed.collectives import broadcast
from ..distributed.consensus import all_gather_object, on_all_ranks
from ..errors import RankMismatchError
from ..placement import Replicate
from ..tensor.sharded_tensor import ShardedTensor

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Differences of rounding, relative to the largest value; of all other floating-point dtypes, ``LOOSE``."""
LOOSE = 2e-2

_contexts: WeakKeyDictionary[nn.Module, ParallelExecutionCtx] = WeakKeyDictionary()
_versions: WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]] = WeakKeyDictionary()


def remember(model: nn.Module, ctx: ParallelExecutionCtx) -> None:
    """Note the ranks of a model, and how often each shard was written to: loading may write on some ranks only."""
    _contexts[model] = ctx
    _versions[model] = {name: (id(p.local), _version(p.local)) for name, p in _shards(model)}


def context_of(model: nn.Module) -> ParallelExecutionCtx | None:
    """The ranks of a parallel model, or of the one inside of a wrapper."""
    return next((_contexts[module] for module in model.modules() if module in _contexts), None)


def compare_parameters(model: nn.Module, ctx: ParallelExecutionCtx) -> None:
    """Raise, on all ranks of the model, if replicated parameters or buffers differ between ranks. A collective.

    Raises:
        RankMismatchError: names the parameter, and the ranks that differ from the first.
    """
    if dist.get_world_size(ctx.world_group) == 1:
        return
    problem = ""
    held = dict(_held(model))
    if ctx.world_size > 1:
        same = {name: local for name, (local, replicated, _) in held.items() if replicated}
        problem = _compare(same, ctx.tp_group)
    if ctx.groups.dp is not None and ctx.dp_size > 1:
        copies = {name: local for name, (local, _, is_copy) in held.items() if is_copy}
        problem = problem or _compare(copies, ctx.groups.dp)
    found = all_gather_object(ctx.world_group, problem, "comparing the parameters")
    first = next(filter(None, found), "")
    if first:
        raise RankMismatchError(first)


def _held(model: nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, bool, bool]]]:
    """What this rank holds, by name: the tensor, whether all tensor-parallel ranks have the same, and whether all
    data-parallel ones have. Buffers may follow the data of a rank, such as the statistics of a batch norm."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedTensor):
            if parameter.spec.placement is not None:
                replicated = isinstance(parameter.placement, Replicate)
                yield name, (parameter.local, replicated and parameter.dp_shard is None, parameter.dp_shard is None)
        else:
            yield name, (parameter.detach(), True, True)
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, ShardedTensor):
            yield name, (buffer, True, False)


def _compare(tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> str:
    """What is wrong with tensors that all ranks of a group must have; empty if nothing is."""
    sums = ArgumentSums()
    for name, tensor in tensors.items():
        sums.add(name, tensor.detach())
    sums.send()
    sums.settle()
    answers = all_gather_object(group, [sums.sums, list(tensors)], "comparing the parameters")
    for rank, (_, names) in enumerate(answers):
        if names != answers[0][1]:
            odd = sorted(set(names) ^ set(answers[0][1]))
            return f"{_who(group, rank)} has other parameters than {_who(group, 0)}: {', '.join(odd[:4])}"
    problems = []
    for name, tensor in tensors.items():
        differing = [rank for rank, (theirs, _) in enumerate(answers) if theirs.get(name) != answers[0][0].get(name)]
        if differing:
            problems += _by_value(name, tensor, differing, group)
    if not problems:
        return ""
    more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
    return (
        f"parameters or buffers that all ranks must have alike differ: {'; '.join(problems[:4])}{more}. Something "
        "changed them on some ranks alone. Make every change of the model on all ranks; load_state gives all of them "
        "the same values again."
    )


def _by_value(name: str, tensor: torch.Tensor, differing: list[int], group: dist.ProcessGroup) -> list[str]:
    """The difference of a tensor, unless it is one of rounding. A collective."""
    shapes = all_gather_object(group, [list(tensor.shape), str(tensor.dtype)], "comparing the parameters")
    if any(shape != shapes[0] for shape in shapes):
        return [f"{name} has another shape or dtype on rank {', '.join(_global(group, r) for r in differing)}"]
    on_host = dist.get_backend(group) != "nccl"
    mine = tensor.detach().cpu() if on_host else tensor.detach()
    first = broadcast(mine.contiguous().clone(), group)
    distance = _distance(first, mine)
    distances = all_gather_object(group, distance, "comparing the parameters")
    limit = TOLERANCES.get(tensor.dtype, LOOSE) if tensor.is_floating_point() else 0.0
    wrong = [rank for rank in differing if not distances[rank] <= limit]  # NaN is wrong
    if wrong:
        ranks = ", ".join(_global(group, rank) for rank in wrong)
        return [f"{name} of rank {ranks} is not that of rank {_global(group, 0)}"]
    if dist.get_rank() == 0:
        warnings.warn(
            f"{name} differs between ranks by rounding (relative difference {max(distances):.1g}): each computes the "
            "gradient of replicated parameters by itself, with kernels that are not deterministic",
            stacklevel=2,
        )
    return []


def _distance(first: torch.Tensor, mine: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where one is finite and the other is not."""
    if not mine.numel():
        return 0.0
    if not mine.is_floating_point():
        return 0.0 if torch.equal(first, mine) else float("inf")
    a, b = first.double(), mine.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    if not a.numel():
        return 0.0
    scale = max(float(a.abs().max()), 1e-12)
    return float((a - b).abs().max()) / scale


def _who(group: dist.ProcessGroup, rank: int) -> str:
    return f"rank {_global(group, rank)}"


def _global(group: dist.ProcessGroup, rank: int) -> str:
    return str(dist.get_process_group_ranks(group)[rank])


# -- shards that one rank alone holds ------------------------------------------------------------------------------


def compare_writes(model: nn.Module, ctx: ParallelExecutionCtx) -> None:
    """Raise, on all ranks, if a shard was written to on some ranks only, or more often. A collective."""
    before = _versions.get(model, {})
    mine = {}
    for name, parameter in _shards(model):
        identity, version = before.get(name, (0, 0))
        if identity == id(parameter.local):
            mine[name] = _version(parameter.local) - version
    answers = all_gather_object(ctx.world_group, mine, "comparing the parameters")
    for name in mine:
        counts = [theirs.get(name) for theirs in answers]
        if None not in counts and len(set(counts)) > 1:
            usual = max(set(counts), key=counts.count)
            ranks = ", ".join(_global(ctx.world_group, r) for r, count in enumerate(counts) if count != usual)
            raise RankMismatchError(
                f"the shard of {name} was not written to as often on rank {ranks} as on the others (writes by rank: "
                f"{', '.join(map(str, counts))}). Make every change of the model on all ranks."
            )


def _shards(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedTensor) and parameter.spec.placement is not None:
            yield name, parameter


def _version(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else local._version


def check_before_saving(model: nn.Module) -> None:
    """What is saved is what all ranks have: compare the inputs of the last calls, and the parameters. A collective."""
    ctx = context_of(model)
    check = ctx.state.input_check if ctx is not None else None
    if ctx is not None and check is not None:
        with on_all_ranks(ctx.world_group, "comparing the inputs"):
            check.flush()
        compare_parameters(model, ctx)
