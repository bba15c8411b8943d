"""How each contender loads a model from a checkpoint. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def single(folder: str, device: torch.device) -> Any:
    """One process, no parallelism."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).to(device)


def transformers_tp(folder: str, device: torch.device) -> Any:
    """transformers' own tensor parallelism, with the plan it ships."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


def dtensor(folder: str, device: torch.device) -> Any:
    """torch's ``parallelize_module`` with a plan written by hand for Llama."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = single(folder, device)
    if model.config.model_type != "llama":
        raise NotImplementedError("no plan was written for this model")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def paraxis(folder: str, device: torch.device, **options: Any) -> Any:
    """Paraxis, without its plan cache."""
    from paraxis import ParallelExecutionCtx, parallelize_model

    group = dist.group.WORLD
    assert group is not None
    ctx = ParallelExecutionCtx(group, device)
    model = parallelize_model(folder, ctx, show_progress=False, **{"cache_plans": False, **options})
    reading = ctx.timings.pop("load")
    planned = sum(ctx.timings.values())
    # the profiler does not see our collectives
    model.known = {"plan": planned, "reading": reading, "collectives": len(ctx.plan.collectives)}
    return model


def paraxis_compiled(folder: str, device: torch.device) -> Any:
    """Paraxis with local programs compiled by Inductor."""
    return paraxis(folder, device, compile="inductor")


CONTENDERS: dict[str, Callable[[str, torch.device], Any]] = {
    "one process": single,
    "transformers TP": transformers_tp,
    "DTensor by hand": dtensor,
    "paraxis": paraxis,
    "paraxis, compiled": paraxis_compiled,
}
ALONE = ("one process",)
"""Contenders without ranks: one process."""
