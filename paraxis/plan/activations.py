"""The peak memory of activations, and the KV cache, on one rank.

Both are measured, not estimated. The model is captured again with the requested batch and context and the parameters
placed by the plan: this gives the local program that the rank will run. It runs on fake tensors, and every storage is
recorded when it is allocated and when it is freed. Prefill needs no more. For training the program runs forward and
backward under autograd, so the activations saved for the backward pass are the ones that autograd saves.

Repeated blocks that the plan left out do not run here either. Each adds the saved activations and the KV cache of the
block it repeats.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from ..capture import capture, mark_output_op
from ..capture.dummy_inputs import takes_token_labels
from ..capture.repeated_blocks import Repeated, without_repeats
from ..compat.torch import FakeTensorMode, TorchDispatchMode, pytree, storage_key
from ..config import Config
from ..context import ParallelExecutionCtx
from ..graph.nodes import module_of
from ..passes.base import PassBase, PassPipeline
from ..passes.build import build_program
from ..passes.pipeline import build_parallel_pass_pipeline
from ..passes.solve import Solved, solved_of
from ..placement import local_shape
from ..tensor.sharded_tensor import ShardedTensor, override_shards
from ..utils.memory import gc_paused
from ..utils.names import block_of
from .build import estimated_times


@dataclass(frozen=True)
class Usage:
    """Bytes that a running program takes on one rank, besides parameters and buffers.

    Attributes:
        activations: Peak memory of intermediate tensors and outputs, without the KV cache.
        cache: The KV cache for the next call, with the room preallocated for appending.
        seconds: Estimated seconds of the call's forward pass, under the cost model.
        communication: Estimated seconds of these in collectives.
    """

    activations: int
    cache: int
    seconds: float = 0.0
    communication: float = 0.0


@dataclass(eq=False)
class Storage:
    """One allocation: its size, the block of the model that made it, and the times of allocation and release."""

    size: int
    block: str
    allocated: int
    freed: int | None = None


@dataclass
class Allocations:
    """All storages that a program allocates. Time counts events: one storage is allocated or freed."""

    storages: list[Storage] = field(default_factory=list)
    time: int = 0
    block: str = ""
    _live: dict[int, tuple[Storage | None, Any]] = field(default_factory=dict)
    """By address: the storage, and a weak reference that reports its release."""

    def record(self, tensor: torch.Tensor, count: bool = True) -> Storage | None:
        """The storage of a tensor, recorded if it is new. ``count=False``, as for parameters, leaves it out: None."""
        memory = tensor.untyped_storage()
        address = storage_key(memory)
        if address not in self._live:
            found = Storage(memory.nbytes(), self.block, self.time) if count else None
            if found is not None:
                self.storages.append(found)
                self.time += 1
            self._live[address] = found, weakref.ref(memory, lambda _: self._release(address))
        return self._live[address][0]

    def _release(self, address: int) -> None:
        found, _ = self._live.pop(address)
        if found is not None:
            found.freed = self.time
            self.time += 1

    def peak(self, copies: Counter[str], saved: list[Storage]) -> int:
        """The peak memory in bytes.

        Repeated blocks that did not run (``copies``: how many repeat which block) each save as much for later as the
        block they repeat, out of ``saved``. That memory counts from the first allocation of the repeated block, which
        then stands for the last of its copies, until the block has freed all it saved: in a forward pass that is the
        end, in a backward pass the end of the block's backward.
        """
        changes: Counter[int] = Counter()
        for each in self.storages:
            changes[each.allocated] += each.size
            changes[self._end(each)] -= each.size
        begin = min((each.allocated for each in self.storages if copies[each.block]), default=0)
        for block, count in copies.items():
            own = [each for each in saved if each.block == block]
            size = count * sum(each.size for each in own)
            changes[begin] += size
            changes[max(map(self._end, own), default=begin)] -= size
        peak = current = 0
        for time in sorted(changes):
            current += changes[time]
            peak = max(peak, current)
        return peak

    def _end(self, storage: Storage) -> int:
        return self.time if storage.freed is None else storage.freed


class _Recorder(TorchDispatchMode):
    """Records the storage of every tensor that an operator returns."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self.allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # an operator reads a value, which a fake tensor does not have; 0 means no rows to process
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and not isinstance(each, ShardedTensor):
                self.allocations.record(each)
        return result


class _Run(Interpreter):
    """Runs a local program, frees every value after its last use, and tracks the current block."""

    def __init__(self, program: GraphModule, allocations: Allocations) -> None:
        super().__init__(program)
        self.allocations = allocations

    def run_node(self, node: Node) -> Any:
        """Run one node, attributing its allocations to its block."""
        if node.op not in ("placeholder", "output"):
            self.allocations.block = block_of(_module_of(node))
        if "random" in node.meta:  # the original operator: the local one draws its seeds, which fake tensors cannot
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            return node.meta["random"](*args, **kwargs)
        return super().run_node(node)


def _module_of(node: Node) -> str:
    """The module that a node belongs to; a collective belongs to the module that computed its input."""
    while "nn_module_stack" not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return module_of(node)


def call_inputs(model: nn.Module, inputs: dict[str, Any], train: bool) -> dict[str, Any]:
    """The inputs with the options that a real call has: prefill asks for the last logits, training for a loss."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if not train and "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    if train and takes_token_labels(model):
        options["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if train and "use_cache" in parameters:
        options["use_cache"] = False
    return {**inputs, **options}


def measure_usage(
    model: nn.Module,
    inputs: dict[str, Any],
    train: bool,
    ctx: ParallelExecutionCtx,
    config: Config,
    repeated: list[Repeated],
) -> Usage | str:
    """The memory that a call of a planned model takes on this rank; the reason, as text, if it cannot be measured."""
    try:
        with _restored(model, ctx):
            program, examples, solved = _local_program(model, inputs, train, ctx, config, repeated)
            return _run(program, examples, solved, train, ctx, repeated)
    except Exception as error:  # its code reads tensor values, or cannot be captured with these sizes
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _local_program(
    model: nn.Module,
    inputs: dict[str, Any],
    train: bool,
    ctx: ParallelExecutionCtx,
    config: Config,
    repeated: list[Repeated],
) -> tuple[GraphModule, dict[str, Any], Solved]:
    """This rank's local program for some inputs, the values of its placeholders, and its solution."""
    pipeline = PassPipeline(_until_kv_cache(config.pipeline or build_parallel_pass_pipeline()))
    config = replace(config, compile=None, mode=None, pipeline=pipeline)
    graphs: list[tuple[GraphModule, list[Any]]] = []
    with torch.set_grad_enabled(train), gc_paused():
        with without_repeats(model, repeated):
            model.train(train)
            capture(model, (), inputs, lambda graph, examples: graphs.append((graph, examples)), forward=True)
        captured, examples = graphs[0]
        names = [str(node.target) for node in captured.graph.find_nodes(op="placeholder")]
        local = build_program(captured, examples, ctx, config)
    return local, dict(zip(names, examples, strict=True)), solved_of(captured)


def _until_kv_cache(pipeline: PassPipeline) -> list[PassBase]:
    """The passes up to the KV cache that appends in place: kernels of one device do not run on fake tensors."""
    passes = list(pipeline)
    last = pipeline.index("append_kv_cache") if "append_kv_cache" in pipeline else len(passes)
    return passes[: last + 1]


def _run(
    program: GraphModule,
    examples: dict[str, Any],
    solved: Solved,
    train: bool,
    ctx: ParallelExecutionCtx,
    repeated: list[Repeated],
) -> Usage:
    """Run a local program, and its backward pass for training, on fake tensors and record its allocations."""
    allocations, rank = Allocations(), ctx.rank
    parameters = [p for p in ctx.param_cache.values() if isinstance(p, ShardedTensor)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        shards = []
        for parameter in parameters:
            shape = local_shape(parameter.placement, parameter.shape, rank)
            shard = torch.empty(shape, dtype=parameter.dtype, device=ctx.current_device)
            shard.requires_grad_(train and parameter.requires_grad)
            if shard.requires_grad:
                shard.grad = torch.empty_like(shard)  # gradients accumulate into memory that is counted elsewhere
            shards.append(shard)
        inputs = [_fake(examples[str(node.target)]) for node in program.graph.find_nodes(op="placeholder")]
        existing = [t for t in (*shards, *(s.grad for s in shards), *inputs) if isinstance(t, torch.Tensor)]
        for tensor in existing:
            if not isinstance(tensor, ShardedTensor):
                allocations.record(tensor, count=False)
        with override_shards(parameters, shards), torch.set_grad_enabled(train), _Recorder(allocations):
            returned = pytree.tree_leaves(_Run(program, allocations).run(*inputs))
            allocations.block = ""
            cached = [] if train else _cached(returned, solved, allocations)
            saved = [each for each in allocations.storages if each.freed is None]
            if train:
                _backward(returned)
    copies = Counter(f"{each.path}.{like}" for each in repeated for like in each.like.values())
    cache = sum(each.size * (1 + copies[each.block]) for each in cached)
    return Usage(allocations.peak(copies, saved) - cache, cache, *estimated_times(solved, repeated))


def _fake(value: Any) -> Any:
    """A fake tensor for an input of the program; parameters have fake shards already."""
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.is_meta else value.device)


def _cached(returned: list[Any], solved: Solved, allocations: Allocations) -> list[Storage]:
    """The storages of the KV cache: tensors that the program returns and that are no outputs of the model."""
    values = [value for step in solved.program.steps if step.call is None for value in step.inputs]
    tensors = [each for each in returned if isinstance(each, torch.Tensor)]
    marked = any(value.node.target is mark_output_op for value in values)
    found = []
    for value, tensor in zip(values, tensors, strict=True):
        if marked and value.node.target is not mark_output_op:
            storage = allocations.record(tensor.local if isinstance(tensor, ShardedTensor) else tensor)
            if storage is not None and storage not in found:
                found.append(storage)
    return found


def _backward(returned: list[Any]) -> None:
    """Gradients of the loss or, without one, of all outputs. Empties the list: a caller drops its outputs as well."""
    results = [t for t in returned if isinstance(t, torch.Tensor) and t.requires_grad]
    results = [t for t in results if not t.dim()] or results
    returned.clear()
    torch.autograd.backward(results, [torch.ones_like(t) for t in results])


@contextmanager
def _restored(model: nn.Module, ctx: ParallelExecutionCtx) -> Iterator[None]:
    """Restore what another capture changes on the model and the context."""
    training, timings = model.training, dict(ctx.timings)
    program, examples = ctx.last_optimized_graph_module, ctx.example_inputs
    try:
        yield
    finally:
        model.train(training)
        ctx.timings = timings
        ctx.last_optimized_graph_module, ctx.example_inputs = program, examples
