"""What the tensors between the weights and the results take of a rank's memory.

They are not estimated but counted. The model is captured once more, with the sequences and tokens that are asked for
and the parameters placed by the plan: the local program of a rank is then the one that runs later. It is run without
memory, on fake tensors, and every storage is noted when it is made and when it is let go. Of a prompt that is all
there is. For training the program runs forward and backward, as autograd does it, so what is kept for the backward
pass is what autograd keeps.

Blocks that were left out of the plan because they are like others were not run. What such a block keeps for the
backward pass, and its part of the cache, is what the block has that it is like.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture import capture, mark_output_op
from ..capture.dummy_inputs import gives_loss_of_tokens
from ..capture.repeated_blocks import Repeated, only_first
from ..capture.trace import gc_paused
from ..config import Config
from ..context import ParallelExecutionCtx
from ..graph.nodes import module_of
from ..optimize.eager_fusions import fuse_eager_operators
from ..optimize.kv_cache_append import append_kv_cache_in_place
from ..passes import without_loading
from ..passes.solve import RESULT, Solved
from ..placement import local_shape
from ..runtime.backend import run_pipeline
from ..tensor.sharded_tensor import ShardedTensor, shards_of
from .plan import block_of


@dataclass(frozen=True)
class Used:
    """Bytes of a rank, beside parameters and buffers, while a program runs.

    Attributes:
        activations: The most that is taken at a time, what is returned to the caller included, less the cache.
        cache: What is kept for the next call, with the room it has to grow.
    """

    activations: int
    cache: int


@dataclass(eq=False)
class Storage:
    """Memory that a program has made: how much, in which block of the model, and when it was made and let go."""

    size: int
    block: str
    made: int
    gone: int | None = None


@dataclass
class Ledger:
    """All storages that a program makes. Time counts the events: one is made, or let go."""

    storages: list[Storage] = field(default_factory=list)
    time: int = 0
    block: str = ""
    _open: dict[int, tuple[Storage | None, Any]] = field(default_factory=dict)
    """By address: the storage, and a weak reference that tells of its end."""

    def see(self, tensor: torch.Tensor, count: bool = True) -> Storage | None:
        """The storage of a tensor, noted if it is new; None for one that is not to be counted, as a parameter's."""
        memory = tensor.untyped_storage()
        address = memory._cdata
        if address not in self._open:
            found = Storage(memory.nbytes(), self.block, self.time) if count else None
            if found is not None:
                self.storages.append(found)
                self.time += 1
            self._open[address] = found, weakref.ref(memory, lambda _: self._let_go(address))
        return self._open[address][0]

    def _let_go(self, address: int) -> None:
        found, _ = self._open.pop(address)
        if found is not None:
            found.gone = self.time
            self.time += 1

    def peak(self, copies: Counter[str], kept: list[Storage]) -> int:
        """The most bytes at a time.

        Blocks that were not run (``copies``, by the block that they are like) have as much ``kept`` for later as that
        one. It counts from where the first of these blocks begins, which then stands for the last one, to where its
        block is done with: forward that is the end, backward the point at which the block has let go of all it kept.
        """
        changes: Counter[int] = Counter()
        for each in self.storages:
            changes[each.made] += each.size
            changes[self._end(each)] -= each.size
        begun = min((each.made for each in self.storages if copies[each.block]), default=0)
        for block, count in copies.items():
            mine = [each for each in kept if each.block == block]
            size = count * sum(each.size for each in mine)
            changes[begun] += size
            changes[max(map(self._end, mine), default=begun)] -= size
        most = now = 0
        for time in sorted(changes):
            now += changes[time]
            most = max(most, now)
        return most

    def _end(self, storage: Storage) -> int:
        return self.time if storage.gone is None else storage.gone


class _Watch(TorchDispatchMode):
    """Notes the storage of every tensor that an operator returns."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # a kernel looks at its data: as if there were nothing to do, in memory that it has by then
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and not isinstance(each, ShardedTensor):
                self.ledger.see(each)
        return result


class _Run(Interpreter):
    """Runs a local program, letting go of every value after its last use, and says which block it is in."""

    def __init__(self, program: GraphModule, ledger: Ledger) -> None:
        super().__init__(program)
        self.ledger = ledger

    def run_node(self, node: Node) -> Any:
        if node.op not in ("placeholder", "output"):
            self.ledger.block = block_of(_place(node))
        if "random" in node.meta:  # the seeds, too, would have to be drawn
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            return node.meta["random"](*args, **kwargs)
        return super().run_node(node)


def _place(node: Node) -> str:
    """The module that a node belongs to; what moves a tensor belongs to the one that made it."""
    while "nn_module_stack" not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return module_of(node)


def as_called(model: nn.Module, inputs: dict[str, Any], train: bool) -> dict[str, Any]:
    """The inputs of a call as it is made: of a prompt the logits of its last position, for training a loss."""
    known = inspect.signature(model.forward).parameters
    more: dict[str, Any] = {}
    if not train and "logits_to_keep" in known:
        more["logits_to_keep"] = 1
    if train and gives_loss_of_tokens(model):
        more["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if train and "use_cache" in known:
        more["use_cache"] = False
    return {**inputs, **more}


def count(
    model: nn.Module,
    inputs: dict[str, Any],
    train: bool,
    ctx: ParallelExecutionCtx,
    config: Config,
    repeated: list[Repeated],
) -> Used | str:
    """What a call of a planned model takes on this rank; a text where that is not known: why."""
    try:
        with _as_it_was(model, ctx):
            program, examples, solved = _local_program(model, inputs, train, ctx, config, repeated)
            return _run(program, examples, solved, train, ctx, repeated)
    except Exception as error:  # it looks at values, or cannot be captured with these sizes
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _local_program(
    model: nn.Module,
    inputs: dict[str, Any],
    train: bool,
    ctx: ParallelExecutionCtx,
    config: Config,
    repeated: list[Repeated],
) -> tuple[GraphModule, dict[str, Any], Solved]:
    """The program of this rank for some inputs, what its placeholders take, and what it was solved with."""
    config = without_loading(config)
    graphs: list[tuple[GraphModule, list[Any]]] = []
    with torch.set_grad_enabled(train), gc_paused():
        with only_first(model, repeated):
            model.train(train)
            capture(model, (), inputs, lambda graph, examples: graphs.append((graph, examples)), forward=True)
        captured, examples = graphs[0]
        names = [str(node.target) for node in captured.graph.find_nodes(op="placeholder")]
        local = run_pipeline(captured, examples, ctx, config)
    fuse_eager_operators(local)
    if not train:
        append_kv_cache_in_place(local)
    return local, dict(zip(names, examples, strict=True)), captured.meta[RESULT]


def _run(
    program: GraphModule,
    examples: dict[str, Any],
    solved: Solved,
    train: bool,
    ctx: ParallelExecutionCtx,
    repeated: list[Repeated],
) -> Used:
    """Run a local program without memory, and the gradients through it, and count."""
    ledger, rank = Ledger(), ctx.rank
    parameters = [p for p in ctx.param_cache.values() if isinstance(p, ShardedTensor)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        shards = []
        for parameter in parameters:
            shape = local_shape(parameter.placement, parameter.shape, rank)
            shard = torch.empty(shape, dtype=parameter.dtype, device=ctx.current_device)
            shard.requires_grad_(train and parameter.requires_grad)
            if shard.requires_grad:
                shard.grad = torch.empty_like(shard)  # gradients are added to: they have a place of their own
            shards.append(shard)
        given = [_fake(examples[str(node.target)]) for node in program.graph.find_nodes(op="placeholder")]
        mine = [t for t in (*shards, *(s.grad for s in shards), *given) if isinstance(t, torch.Tensor)]
        for tensor in mine:
            if not isinstance(tensor, ShardedTensor):
                ledger.see(tensor, count=False)
        with shards_of(parameters, shards), torch.set_grad_enabled(train), _Watch(ledger):
            returned = pytree.tree_leaves(_Run(program, ledger).run(*given))
            ledger.block = ""
            cached = [] if train else _cached(returned, solved, ledger)
            kept = [each for each in ledger.storages if each.gone is None]
            if train:
                _backward(returned)
    copies = Counter(f"{each.path}.{like}" for each in repeated for like in each.like.values())
    cache = sum(each.size * (1 + copies[each.block]) for each in cached)
    return Used(ledger.peak(copies, kept) - cache, cache)


def _fake(value: Any) -> Any:
    """An input of the program without its data; parameters are given otherwise."""
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.is_meta else value.device)


def _cached(returned: list[Any], solved: Solved, ledger: Ledger) -> list[Storage]:
    """The storages of what is kept for the next call: returned, and not for the caller to read."""
    values = [value for step in solved.program.steps if step.call is None for value in step.inputs]
    tensors = [each for each in returned if isinstance(each, torch.Tensor)]
    marked = any(value.node.target is mark_output_op for value in values)
    found = []
    for value, tensor in zip(values, tensors, strict=True):
        if marked and value.node.target is not mark_output_op:
            storage = ledger.see(tensor._local if isinstance(tensor, ShardedTensor) else tensor)
            if storage is not None and storage not in found:
                found.append(storage)
    return found


def _backward(returned: list[Any]) -> None:
    """Gradients of the loss or, if there is none, of all results; the list is emptied, as a caller lets go of it."""
    results = [t for t in returned if isinstance(t, torch.Tensor) and t.requires_grad]
    results = [t for t in results if not t.dim()] or results
    returned.clear()
    torch.autograd.backward(results, [torch.ones_like(t) for t in results])


@contextmanager
def _as_it_was(model: nn.Module, ctx: ParallelExecutionCtx) -> Iterator[None]:
    """Whatever a further capture changes is put back."""
    training, timings = model.training, dict(ctx.timings)
    program, examples = ctx.last_optimized_graph_module, ctx.example_inputs
    try:
        yield
    finally:
        model.train(training)
        ctx.timings = timings
        ctx.last_optimized_graph_module, ctx.example_inputs = program, examples
