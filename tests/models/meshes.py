"""Training on meshes of data-parallel and tensor-parallel ranks, beside the unsharded model."""

from __future__ import annotations

from typing import Any

import torch
from models.compare import reference
from torch.distributed.device_mesh import init_device_mesh


def mesh_context(dp: int, tp: int, device: str = "cpu") -> Any:
    from paraxis import ParallelExecutionCtx

    if torch.device(device).type == "cuda":
        torch.zeros(1, device=device)  # or a mesh takes one device per rank
    mesh = init_device_mesh(torch.device(device).type, (dp, tp), mesh_dim_names=("dp", "tp"))
    return ParallelExecutionCtx(mesh=mesh, current_device=torch.device(device))


def on_mesh(folder: str, dp: int, tp: int, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """(parallel model, its context)"""
    from paraxis import parallelize_model

    ctx = mesh_context(dp, tp, device)
    return parallelize_model(folder, ctx, show_progress=False, **options), ctx


def batches(count: int, rows: int = 4, length: int = 10, vocab_size: int = 256) -> list[torch.Tensor]:
    """Token ids of whole batches, of which every data-parallel rank takes its rows."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (rows, length), generator=generator) for _ in range(count)]


def mine(ids: torch.Tensor, ctx: Any) -> torch.Tensor:
    return ids.chunk(ctx.dp_size)[ctx.dp_rank]


def steps(model: Any, data: list[torch.Tensor], clip: float | None = 0.5, optimizer: Any = None) -> list[float]:
    """Steps of AdamW; the loss of each."""
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


def mean_over(losses: list[float], group: Any) -> list[float]:
    """The losses of the whole batch: means over data-parallel ranks, whose batches are of one size."""
    total = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=group)
    return (total / torch.distributed.get_world_size(group)).tolist()


def beside_unsharded(
    folder: str,
    dp: int,
    tp: int,
    data_parallel: str,
    count: int = 20,
    rows: int = 4,
    device: str = "cpu",
    **options: Any,
) -> Any:
    """Losses of both, how far parameters are off, and what a rank holds beside what there is."""
    model, ctx = on_mesh(folder, dp, tp, device, data_parallel=data_parallel, **options)
    unsharded = reference(folder).to(device)
    data = ([ids.to(device) for ids in batches(2, rows)] * count)[:count]  # seen again, so that the loss falls
    for each in (model, unsharded):
        each.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    found = mean_over(steps(model, [mine(ids, ctx) for ids in data[:-1]], optimizer=optimizer), ctx.groups.dp)
    ids = mine(data[-1], ctx)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    held = sum(_bytes(p) + _bytes(p.grad) for p in model.parameters())
    held += sum(_bytes(t) for state in optimizer.state.values() for t in state.values() if t.ndim)
    placed = all(p.grad.placement == p.placement and p.grad.dp_shard == p.dp_shard for p in model.parameters())
    model.zero_grad()
    right = steps(unsharded, data[:-1])
    everything = sum(4 * p.nbytes for p in unsharded.parameters())
    errors = {
        name: float((p.full_tensor() - q).norm() / q.norm().clamp(min=1e-6))
        for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True)
    }
    return {
        "losses": max(abs(a - b) for a, b in zip(found, right, strict=True)),
        "parameters": max(errors.values()),
        "fraction": held / everything,
        "placed": placed,
        "first": right[0],
        "last": right[-1],
        "plan": ctx.plan.data_parallel,
    }


def _bytes(tensor: Any) -> int:
    """The memory that a tensor keeps, be it a view of more."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage().nbytes()
