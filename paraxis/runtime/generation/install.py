"""Where the generation loop runs, and where transformers' own does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

from ...compat.generation import clear_dynamic_cache, has_plain_loop, install_sampling_loop
from ...compat.generation_config import install_prepared_configs
from ...config import Config
from ...context import EngineState, ParallelExecutionCtx
from ...passes.setting import compiles, inductor_options
from ..cuda_graphs import pool_of
from ..early_launch import EarlyLaunches
from .decode_state import StatePool
from .decode_steps import StepFailed
from .loop import GenerationLoop
from .request import Request, request_of

logger = logging.getLogger("paraxis")


def fast_generation(ctx: ParallelExecutionCtx, config: Config) -> bool:
    """Whether the generation loop pays: where launching kernels and waiting for the device costs more than a
    preallocated cache that attention reads in full."""
    return ctx.current_device.type == "cuda" and compiles(ctx, config)


def captures_steps(ctx: ParallelExecutionCtx, config: Config) -> bool:
    """Whether full decode steps are captured as CUDA graphs: where programs are."""
    return ctx.current_device.type == "cuda" and bool(inductor_options(ctx, config).get("triton.cudagraphs"))


def install_generation_loop(model: Any, ctx: ParallelExecutionCtx, config: Config) -> None:
    """Let ``generate`` of a parallel model run the generation loop where it can and where that pays."""
    if has_plain_loop(model):
        install_sampling_loop(model, Generation(ctx, config))
        install_prepared_configs(model)
        if ctx.current_device.type == "cuda" and config.compile is not None:
            ctx.state.early_launches = EarlyLaunches(ctx.current_device)
    if hasattr(model, "generate"):
        model.generate = _noted(model.generate, ctx.state)


def _noted(generate: Callable[..., Any], state: EngineState) -> Callable[..., Any]:
    """A model's ``generate`` that the engine knows to be running. Its prefill starts before it is prepared, if its
    prompt is like an earlier one."""

    @wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        early, outer = state.early_launches, state.generating
        prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        state.generating = outer or object()
        try:
            with nullcontext() if early is None else early.prefill_of(prompt):
                return generate(*args, **kwargs)
        finally:
            state.generating = outer

    return run


class Generation:
    """What ``generate`` of one model calls to sample or to decode greedily."""

    def __init__(self, ctx: ParallelExecutionCtx, config: Config) -> None:
        self.ctx, self.config = ctx, config
        self.pool = StatePool(ctx.current_device)
        self.works = True
        """Whether no decode step on a preallocated cache has failed."""

    def __call__(
        self,
        model: Any,
        plain: Callable[..., Any],
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **inputs: Any,
    ) -> Any:
        """What transformers' loop, ``plain``, returns."""
        otherwise = partial(
            plain,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            **inputs,
        )
        fast = self.works and fast_generation(self.ctx, self.config)
        if not fast and inputs.get("attention_mask") is None:
            return otherwise(streamer=streamer)
        request = request_of(
            model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, inputs
        )
        if request is None:
            return otherwise(streamer=streamer)
        if fast:
            return self._run(model, request, otherwise)
        return otherwise(streamer=streamer, attention_mask=request.inputs["attention_mask"])  # none, if it is full

    def _run(self, model: Any, request: Request, otherwise: Callable[..., Any]) -> Any:
        """The result of the loop; that of ``otherwise`` if the model does not run with a preallocated cache."""
        graphs = partial(pool_of, self.ctx) if captures_steps(self.ctx, self.config) else None
        loop = GenerationLoop(model, self.ctx, self.pool, request, graphs)
        drawn = None if loop.generator is None else loop.generator.get_state()
        try:
            return loop.run()
        except StepFailed as error:
            self.works = False
            if self.ctx.is_first:
                reason = (str(error).splitlines() or [type(error.__cause__).__name__])[0]
                logger.warning("generate uses a growing KV cache, since a preallocated one failed: %s", reason)
        if loop.generator is not None and drawn is not None:
            loop.generator.set_state(drawn)
        clear_dynamic_cache(request.cache)
        streamer = request.streamer
        return otherwise(streamer=streamer and WithoutFirst(streamer, loop.streamed))


class WithoutFirst:
    """A streamer that has got the first tokens already."""

    def __init__(self, streamer: Any, count: int) -> None:
        self.streamer, self.count = streamer, count

    def put(self, value: Any) -> None:
        """Pass on the tokens of a step, but for the first steps."""
        self.count -= 1
        if self.count < 0:
            self.streamer.put(value)

    def end(self) -> None:
        """Pass on the end."""
        self.streamer.end()
