"""``generate`` of a parallel model: all ranks sample the same tokens, and it is an error if they do not.

Tensor-parallel ranks run the generation loop each by itself and must take the same decisions. Before it starts, they
compare its arguments and take over the random state of the first rank, in one exchange that waits ``sync_timeout`` at
most. Each decode step compares its inputs (:mod:`paraxis.distributed.input_check`), and at the end they compare the
results.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..context import ParallelExecutionCtx
from ..data_parallel.shard import shards_parameters
from ..distributed.activity import activity
from ..distributed.input_check import compare_arguments
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.unshard import unsharded_for_inference

RESULT = ("sequences",)
"""What to compare of a result with fields; a result without is compared itself."""


def agreed_generate(
    generate: Callable[..., Any], model: nn.Module, ctx: ParallelExecutionCtx, config: Config
) -> Callable[..., Any]:
    """The model's ``generate``, with the same random state, arguments and results on all ranks. A collective.

    Data-parallel ranks may generate other texts, of other lengths, so that what they shard is unsharded once, before.
    """
    names = tuple(inspect.signature(generate).parameters)
    sharded = shards_parameters(ctx, config)

    def same_draws(*args: Any, **kwargs: Any) -> Any:
        check = ctx.state.input_check
        with activity("generate"):
            _agree(ctx, config, _arguments(names, args, kwargs, model) if check is not None else {})
            nested = check is None or check.steps > 0
            if check is not None and not nested:
                check.steps = 1
            try:
                with _unsharded(model) if sharded else nullcontext():
                    result = generate(*args, **kwargs)
                if check is not None and not nested:
                    check.note("the end of generate", ("output",), (_compared(result),), {})
                    check.flush()
                return result
            finally:
                if check is not None and not nested:
                    check.steps = 0

    return same_draws


def _unsharded(model: nn.Module) -> AbstractContextManager[None]:
    return unsharded_for_inference(p for p in model.parameters() if isinstance(p, ShardedTensor))


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], model: Any) -> dict[str, Any]:
    """The arguments by name; configurations as plain data."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if getattr(model, "generation_config", None) is not None:
        named["model.generation_config"] = model.generation_config
    return {name: _plain(value) for name, value in named.items()}


def _plain(value: Any) -> Any:
    is_config = hasattr(value, "to_dict") and not isinstance(value, (torch.Tensor, Mapping))
    return value.to_dict() if is_config else value


def _compared(result: Any) -> Any:
    for name in RESULT:
        if isinstance(result, Mapping) and name in result:
            return result[name]
    return result


def _agree(ctx: ParallelExecutionCtx, config: Config, arguments: Mapping[str, Any]) -> None:
    """Compare the arguments between tensor-parallel ranks, and take over the random state of the first."""
    device = ctx.current_device

    def states() -> list[str] | None:
        if ctx.rank != 0:
            return None
        found = [torch.get_rng_state()]
        if device.type == "cuda":
            found.append(torch.cuda.get_rng_state(device))
        return [base64.b64encode(state.numpy().tobytes()).decode() for state in found]

    first = compare_arguments(ctx.tp_group, "generate", arguments, config.sync_timeout, states)[0]
    if ctx.rank == 0:
        return
    cpu, *cuda = (torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for text in first)
    torch.set_rng_state(cpu)
    if cuda and device.type == "cuda":
        torch.cuda.set_rng_state(cuda[0], device)
