"""Training on meshes of data-parallel and tensor-parallel ranks, against the unsharded model."""

from __future__ import annotations

from typing import Any

import torch
from models.compare import parameter_errors, reference
from torch.distributed.device_mesh import init_device_mesh


def mesh_context(dp: int, tp: int, device: str = "cpu") -> Any:
    """The context of a mesh of ``dp`` × ``tp`` ranks."""
    from paraxis import ParallelExecutionCtx

    if torch.device(device).type == "cuda":
        torch.zeros(1, device=device)  # selects the device: otherwise a mesh takes one device per rank
    mesh = init_device_mesh(torch.device(device).type, (dp, tp), mesh_dim_names=("dp", "tp"))
    return ParallelExecutionCtx(mesh=mesh, current_device=torch.device(device))


def parallel_on_mesh(folder: str, dp: int, tp: int, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """(parallel model, its context)"""
    from paraxis import parallelize_model

    ctx = mesh_context(dp, tp, device)
    return parallelize_model(folder, ctx, show_progress=False, **options), ctx


def batches(count: int, rows: int = 4, length: int = 10, vocab_size: int = 256) -> list[torch.Tensor]:
    """Token ids of global batches, of which every data-parallel rank takes its rows."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (rows, length), generator=generator) for _ in range(count)]


def rows_of_rank(ids: torch.Tensor, ctx: Any) -> torch.Tensor:
    """The rows of a global batch that this data-parallel rank trains on."""
    return ids.chunk(ctx.dp_size)[ctx.dp_rank]


def train_steps(model: Any, data: list[torch.Tensor], clip: float | None = 0.5, optimizer: Any = None) -> list[float]:
    """Train with AdamW, one step per batch; the loss of each."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def mean_over_ranks(losses: list[float], group: Any) -> list[float]:
    """The losses of the global batches: means over data-parallel ranks, whose batches have the same size."""
    total = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=group)
    return (total / torch.distributed.get_world_size(group)).tolist()


def train_against_unsharded(
    folder: str,
    dp: int,
    tp: int,
    data_parallel: str,
    count: int = 20,
    rows: int = 4,
    device: str = "cpu",
    **options: Any,
) -> Any:
    """Errors of losses and parameters, and the fraction of parameters, gradients and states that a rank holds."""
    model, ctx = parallel_on_mesh(folder, dp, tp, device, data_parallel=data_parallel, **options)
    unsharded = reference(folder).to(device)
    data = ([ids.to(device) for ids in batches(2, rows)] * count)[:count]  # repeated, so that the loss falls
    for each in (model, unsharded):
        each.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    local_data = [rows_of_rank(ids, ctx) for ids in data]
    found = mean_over_ranks(train_steps(model, local_data[:-1], optimizer=optimizer), ctx.groups.dp)
    model(input_ids=local_data[-1], labels=local_data[-1], use_cache=False).loss.backward()
    local_bytes = sum(_bytes(p) + _bytes(p.grad) for p in model.parameters())
    local_bytes += sum(_bytes(t) for state in optimizer.state.values() for t in state.values() if t.ndim)
    placed = all(p.grad.placement == p.placement and p.grad.dp_shard == p.dp_shard for p in model.parameters())
    model.zero_grad()
    right = train_steps(unsharded, data[:-1])
    return {
        "losses": max(abs(a - b) for a, b in zip(found, right, strict=True)),
        "parameters": max(parameter_errors(model, unsharded).values()),
        "fraction": local_bytes / sum(4 * p.nbytes for p in unsharded.parameters()),
        "placed": placed,
        "first": right[0],
        "last": right[-1],
        "plan": ctx.plan.data_parallel,
    }


def _bytes(tensor: Any) -> int:
    """The memory that a tensor keeps alive, which is more than its own if it is a view."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage().nbytes()
