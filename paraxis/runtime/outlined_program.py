"""Running an outlined program: the head, the body once per period with that period's tensors, the tail.

A step of a model of eighty blocks calls the program of a block eighty times. Which values each call takes is worked out
when the program is made: running it is a loop over selections from one list of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..compat.torch import FakeTensor, enable_python_dispatcher, plain_size
from ..graph.outline import Outline, Piece, Role
from ..graph.python_calls import taking_list
from .guards import picker

CompilePiece = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""Compiles a graph for example inputs."""


@dataclass
class Arguments:
    """The arguments of an outlined program.

    Attributes:
        own: The placeholders of the program of the first blocks, in order.
        roles: What they are to their blocks; those without a role are shared.
        others: The same names in the blocks that the program does not have: arguments after its own.
        slots: The position of each argument of the outlined program, for its own placeholders and for ``others``.
    """

    own: list[Node]
    roles: Mapping[Node, Role]
    others: list[Role]
    slots: Mapping[Node | Role, int]


class OutlinedProgram:
    """A program of all blocks, called with the values of its arguments.

    It returns the results of the program of the first blocks, as if that had all blocks, and then those results that
    each period returns, for the periods that the program of the first blocks does not have.

    Args:
        outline: The parts.
        arguments: What it is called with.
        head: How many blocks come before the periods.
        period: How many blocks a period has.
        count: How many periods there are.
        examples: Fake arguments of the program of the first blocks.
        fake_mode: Their mode.
        compile_piece: Compiles the parts; None if Python runs them.
    """

    def __init__(
        self,
        program: GraphModule,
        outline: Outline,
        arguments: Arguments,
        head: int,
        period: int,
        count: int,
        examples: Sequence[Any],
        fake_mode: Any,
        compile_piece: CompilePiece | None,
    ) -> None:
        values = _values(program, examples, fake_mode) if compile_piece is not None else {}
        symbols = _Symbols(arguments.own, values)
        by_role: dict[Role, Any] = {role: node for node, role in arguments.roles.items()}

        def argument_of(node: Node, number: int) -> int:
            """The argument that a period has in the place of one of the first period's."""
            role = arguments.roles.get(node)
            if number == 0 or role is None or not head <= role[1] < head + period:
                return arguments.slots[node]
            other = role[0], role[1] + number * period
            return arguments.slots[by_role.get(other, other)]

        # Values: the arguments, sizes, what the head returns, what a period returns.
        parts = (outline.head, outline.body, outline.tail)
        needed = [symbols.needed(piece, values) if compile_piece is not None else [] for piece in parts]
        self._sizes: list[tuple[int, int | None]] = []
        for number, names in ((0, needed[0]), *((k, needed[1]) for k in range(count)), (0, needed[2])):
            self._sizes += [(argument_of(node, number), dim) for node, dim in map(symbols.source, names)]
        self._sizes = list(dict.fromkeys(self._sizes))
        total = len(arguments.slots)
        first = total + len(self._sizes)
        from_head = {node: first + i for i, node in enumerate(outline.head.outputs)}
        from_body = {node: first + len(from_head) + i for i, node in enumerate(outline.body.outputs)}
        shared = {
            *outline.tail.inputs,
            *outline.passed.values(),
            *(n for n in outline.body.inputs if n not in outline.carried),
        }
        self._once = [slot for node, slot in from_head.items() if node not in shared]
        self._space = [None] * (len(from_head) + len(from_body))
        self._at_head, self._at_body = first, first + len(from_head)

        def size_of(name: str, number: int = 0) -> int:
            node, dim = symbols.source(name)
            return total + self._sizes.index((argument_of(node, number), dim))

        def before(node: Node) -> int:
            return from_head[node] if node in from_head else arguments.slots[node]

        def in_period(node: Node, number: int) -> int:
            if number > 0 and node in outline.carried:
                return from_body[outline.carried[node]]
            return from_head[node] if node in from_head else argument_of(node, number)

        def after(node: Node) -> int:
            return from_body[outline.first[node]] if node in outline.first else before(node)

        pieces: list[Callable[..., Any]] = []
        for piece, names in zip(parts, needed, strict=True):
            if compile_piece is None:
                pieces.append(taking_list(piece.module))
                continue
            inputs = [*(values[node] for node in piece.inputs), *map(symbols.value, names)]
            pieces.append(_from_list(compile_piece(_with_sizes(piece.module, names), inputs)))
        self._head, self._body, self._tail = pieces
        self._head_takes = picker([*map(before, outline.head.inputs), *map(size_of, needed[0])])
        self._takes = [
            picker([*(in_period(n, k) for n in outline.body.inputs), *(size_of(name, k) for name in needed[1])])
            for k in range(count)
        ]
        self._tail_takes = picker([*map(after, outline.tail.inputs), *map(size_of, needed[2])])
        self.own = len(outline.tail.outputs)
        """How many results the program of the first blocks has."""
        self._passed = [(i, after(node)) for i, node in outline.passed.items()]
        self._returned = [(i, j, from_body[node]) for i, j, node in outline.returned]
        self.extra = [j for _ in range(2, count) for _, j, _ in outline.returned]
        """For each result after those of the first blocks, the one that it is like."""

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run it."""
        values = [*arguments, *(arguments[i] if dim is None else arguments[i].shape[dim] for i, dim in self._sizes)]
        values += self._space
        head, body = self._at_head, self._at_body
        values[head:body] = self._head(list(self._head_takes(values)))
        returned: list[list[Any]] = []
        run, nothing = self._body, [None] * (len(values) - body)
        for takes in self._takes:
            passed = list(takes(values))
            values[body:] = nothing  # what was returned before is freed when it was read
            for slot in self._once:
                values[slot] = None
            values[body:] = run(passed)
            if self._returned:
                returned.append([values[slot] for _, _, slot in self._returned])
        results = list(self._tail(list(self._tail_takes(values))))
        for i, slot in self._passed:
            results[i] = values[slot]
        for k, (first, second, _) in enumerate(self._returned):
            results[first], results[second] = returned[0][k], returned[1][k]
        for of_period in returned[2:]:
            results += of_period
        return results


def _values(program: GraphModule, examples: Sequence[Any], fake_mode: Any) -> dict[Node, Any]:
    """The (fake) value of every node, all of one mode: Dynamo's own for inputs is another than that for backends."""
    interpreter = Interpreter(program, garbage_collect_values=False)
    # The dispatcher in Python: some operators have no other implementation for symbolic sizes.
    with fake_mode, torch.no_grad(), enable_python_dispatcher():
        interpreter.run(
            *(_like(x) if isinstance(x, FakeTensor) and x.fake_mode is not fake_mode else x for x in examples)
        )
    return interpreter.env


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _from_list(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda passed: run(*passed)


class _Symbols:
    """Symbolic sizes, and the arguments that they are read from."""

    def __init__(self, placeholders: Sequence[Node], values: Mapping[Node, Any]) -> None:
        self._known: dict[str, Any] = {}
        self.sources: list[tuple[Node, int | None]] = []
        for node in placeholders:
            value = values.get(node)
            sizes = [(None, value)] if isinstance(value, torch.SymInt) else []
            if isinstance(value, torch.Tensor):
                sizes = list(enumerate(value.shape))  # type: ignore[arg-type]
            for dim, size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and str(size) not in self._known:
                    self._known[str(size)] = plain_size(size)
                    self.sources.append((node, dim))

    def source(self, name: str) -> tuple[Node, int | None]:
        """The argument that a symbol is, or the dimension of an argument that has its size."""
        return self.sources[list(self._known).index(name)]

    def value(self, name: str) -> Any:
        """The symbolic size of this name."""
        return self._known[name]

    def needed(self, piece: Piece, values: Mapping[Node, Any]) -> list[str]:
        """The symbols that a piece takes beside its inputs: all, if it has to do with any.

        Inductor's cache compares the conditions under which a program was captured, which are on all of them.
        """
        passed = [values[node] for node in piece.inputs]
        sizes = [x for x in passed if isinstance(x, torch.SymInt)]
        sizes += [n for x in passed if isinstance(x, torch.Tensor) for n in (*x.shape, *x.stride())]
        if not any(isinstance(size, torch.SymInt) for size in sizes):
            return []
        inputs = {str(x) for x in passed if isinstance(x, torch.SymInt) and x.node.expr.is_Symbol}
        return [name for name in self._known if name not in inputs]


def _with_sizes(module: GraphModule, names: list[str]) -> GraphModule:
    """The graph with these sizes as its last arguments."""
    if not names:
        return module
    graph: Graph = module.graph
    last = graph.find_nodes(op="placeholder")[-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
        for name in reversed(names):
            graph.placeholder(f"size_{name}")
    module.recompile()
    return module
