"""Running the steps of a batch on one rank: the model's program, on tokens of many sequences and a paged KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compat.continuous_batching import is_stateful
from ...compat.dynamo import mark_maybe_dynamic
from ...compat.generation import has_plain_layers
from ...compat.paged_attention import PAGED, PagedStep, paged_step, register_paged_attention
from ...compat.transformers import (
    attention_implementation,
    set_attention_implementation,
    supports_attention_interface,
)
from ...context import ParallelExecutionCtx
from ...distributed.consensus import on_all_ranks
from ...kernels.cpu.build import load_kernel
from ...tensor.sharded_tensor import ShardedTensor
from ..cuda_graphs import pool_of
from ..generation.install import captures_steps
from ..generation.step_graph import changes_seen, is_one_program
from .decode_graphs import DecodeGraphs
from .device_step import DeviceStep, runs_on
from .paged_cache import CachedStep, Layer, MeasuredStep, PagedCache
from .step import Step

FEWEST = 2
"""Tokens, and rows of logits, of a step that is not a single decode step: torch specializes programs on a size of 1."""


SHAPES = (1, 1), (FEWEST + 3, FEWEST)
"""(tokens, rows of logits) of one step of each program: torch takes sizes that are equal for the same one."""


class Runner:
    """Runs steps on this rank.

    Args:
        model: A parallel model.
        ctx: Its context.
    """

    def __init__(self, model: Any, ctx: ParallelExecutionCtx) -> None:
        check_model(model)
        register_paged_attention()
        self.model, self.ctx, self.device = model, ctx, ctx.current_device
        self.cache: PagedCache | None = None
        self.layers: list[Layer] = []
        self._on_device = runs_on(self.device)
        self._decode_graphs: DecodeGraphs | None = None
        self._configs = list({id(c): c for c in _configs(model)}.values())
        self._slices_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def measure(self) -> int:
        """Learn what the KV cache of this rank is like; the bytes that a position takes. A collective.

        It captures both programs that steps run: that of a single token, and that of any other number.
        """
        if not self.layers:
            for tokens, rows in SHAPES:
                measured = MeasuredStep()
                self._forward_zeros(measured, tokens, rows)
            self.layers = measured.layers
        with on_all_ranks(self.ctx.tp_group, "measuring the KV cache"):
            if not self.layers:
                raise RuntimeError(
                    f"{type(self.model).__name__} has run without attention: it has no KV cache to batch"
                )
        return sum(layer.bytes_per_position for layer in self.layers)

    def warm_up(self) -> None:
        """Compile the programs of steps: their second run does. A collective, after :meth:`measure`."""
        for tokens, rows in SHAPES:
            self._forward_zeros(MeasuredStep(), tokens, rows)
        if self.device.type == "cpu":
            load_kernel("paged_attention")

    def allocate(self, blocks: int, block_size: int) -> None:
        """Allocate the KV cache."""
        self.cache = PagedCache(self.layers, blocks, block_size, self.device)
        if self._on_device and self._captures():
            longest = longest_sequence(self.model.config)
            self._decode_graphs = DecodeGraphs(
                self.cache,
                self._forward,
                blocks if longest is None else min(blocks, -(-longest // block_size)),
                lambda: (changes_seen(), self.ctx.compile_times),
                lambda: is_one_program(self.model),
                pool_of(self.ctx),
                self.device,
            )

    def _captures(self) -> bool:
        """Whether decode steps are captured as CUDA graphs: where those of ``generate`` are."""
        call = getattr(self.model.__dict__.get("forward"), "leads_in", None)
        return call is not None and captures_steps(self.ctx, call.config)

    def run(self, step: Step) -> Tensor:
        """The logits of the rows of a step. All ranks run the same one."""
        assert self.cache is not None
        if self._decode_graphs is not None and (decoded := self._decode_graphs.run(step)) is not None:
            return decoded
        ids, positions, rows = (torch.from_numpy(x) for x in (step.ids, step.positions, step.rows))
        wanted = len(rows)
        if len(ids) > 1:
            rows = _at_least(rows, FEWEST)
        cached = (DeviceStep.of if self._on_device else CachedStep)(self.cache, step, self.device)
        logits = self._forward(cached, ids, positions, rows)
        cached.check_complete()
        return logits[:wanted]

    def _forward_zeros(self, step: PagedStep, tokens: int, rows: int) -> None:
        self._forward(step, torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), torch.arange(rows))

    def _forward(self, step: PagedStep, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        ids, positions, rows = (x.to(self.device) for x in (ids[None], positions[None], rows))
        if ids.shape[1] > 1:
            for tensor in (ids, positions, rows):
                mark_maybe_dynamic(tensor, tensor.dim() - 1)
        options: dict[str, Any] = {"logits_to_keep": rows} if self._slices_logits else {}
        check = self.ctx.state.input_check
        with torch.no_grad(), paged_step(step), self._paged(), check.comparing_tokens() if check else nullcontext():
            result = self.model(input_ids=ids, position_ids=positions, use_cache=False, **options)
        full = result.logits.full_tensor() if isinstance(result.logits, ShardedTensor) else result.logits
        logits: Tensor = full[0]
        return logits if self._slices_logits else logits[rows]

    @contextmanager
    def _paged(self) -> Iterator[None]:
        """Inside, the model's attention is paged."""
        before = [attention_implementation(config) for config in self._configs]
        try:
            for config in self._configs:
                set_attention_implementation(config, PAGED)
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                set_attention_implementation(config, implementation)  # type: ignore[arg-type]


def check_model(model: Any) -> None:
    """Raise, on all ranks alike, if requests to this model cannot be batched continuously."""
    name, config = type(model).__name__, getattr(model, "config", None)
    problem = None
    if config is None or not hasattr(model, "generate"):
        problem = "it does not generate text"
    elif not has_plain_layers(config) or is_stateful(model):
        problem = "its layers are not all of full attention or of a sliding window with a KV cache of their own"
    elif not supports_attention_interface(model):
        problem = "its attention does not go through transformers' attention interface"
    elif "position_ids" not in inspect.signature(type(model).forward).parameters:
        problem = "its forward takes no position_ids"
    if problem is not None:
        raise NotImplementedError(f"{name} cannot be batched continuously: {problem}. Use model.generate")


def longest_sequence(config: Any) -> int | None:
    """How many positions a sequence may have; None if the model does not say.

    RoPE that changes with the longest sequence of a batch is used only below the length at which it would change.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    for name in ("rope_parameters", "rope_scaling"):
        scaling = getattr(text, name, None)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "longrope":
            original = scaling.get("original_max_position_embeddings")
            limit = original or getattr(text, "original_max_position_embeddings", None) or limit
    return int(limit) if isinstance(limit, int) and limit > 0 else None


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations by which the layers of the decoder choose their attention."""
    yield model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config"):
            yield module.config


def _at_least(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) >= count else torch.cat([rows, rows.new_zeros(count - len(rows))])


def agreed_blocks(ctx: ParallelExecutionCtx, mine: int) -> int:
    """The number of blocks that all ranks have room for."""
    count = torch.tensor(mine, device=ctx.current_device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN, group=ctx.tp_group)
    return int(count)
