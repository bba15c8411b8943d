"""Outlining: a deep program as a head, one body that repeats, and a tail.

The program of a model of 80 equal blocks has 80 equal regions. A compiler needs to see one of them. Here a program of
the first few blocks is divided into

- the *head*: everything before the first repeated period of blocks, with the first blocks in it;
- the *body*: one period, which takes the results of the period before it, the parameters and KV caches of its own
  blocks, and what all blocks share (positions, masks, the angles of rotary embeddings);
- the *tail*: what comes after the last block.

A period is found by dependencies and not by names: a node belongs to the last block of whose inputs its value depends.
So what a rewrite has fused across the border of two blocks (the residual sum of one and the norm of the next) is in the
body as well. The program has two periods, and they must be equal node by node, with every value that enters them either
the same in both or made by the period before; otherwise there is no outline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..compat.torch import schema_or_none
from .mutation import is_view

Role = tuple[str, int]
"""What an input is to its block: its name there, and the block."""


@dataclass
class Piece:
    """A part of a program.

    Attributes:
        module: Its graph; called with the values of ``inputs``, it returns those of ``outputs``.
        inputs: The nodes of the program whose values it takes.
        outputs: The nodes of the program whose values it returns, or constants.
    """

    module: GraphModule
    inputs: list[Node]
    outputs: list[Any]


@dataclass
class Outline:
    """A program divided into head, body and tail.

    Attributes:
        head: Everything before the first period that is the body.
        body: The period.
        tail: What follows the last period.
        carried: For inputs of the body that the period before it makes: the node of the body that makes the next one.
        first: For nodes of the second period that the tail takes, those of the body.
        returned: Results that every period returns: position in the first period, in the second, and node of the body.
        passed: Results that the tail does not compute, by position: an input of the program, or a node of the head or
            the second period.
    """

    head: Piece
    body: Piece
    tail: Piece
    carried: dict[Node, Node] = field(default_factory=dict)
    first: dict[Node, Node] = field(default_factory=dict)
    returned: list[tuple[int, int, Node]] = field(default_factory=list)
    passed: dict[int, Node] = field(default_factory=dict)


def outline(module: GraphModule, blocks: Mapping[Node, Role], head: int, period: int) -> Outline | str:
    """Divide a program of ``head + 2 * period`` blocks; or why that is not possible.

    Args:
        module: The program. Its output is a flat tuple.
        blocks: Roles of placeholders that belong to a block. All others are shared.
        head: How many blocks are in the head.
        period: How many blocks make a period.
    """
    return _Outliner(module, dict(blocks), head, period).run()


class _Outliner:
    def __init__(self, module: GraphModule, blocks: dict[Node, Role], head: int, period: int) -> None:
        self.module, self.graph, self.roles, self.period = module, module.graph, blocks, period
        self.parts = parts_of(module.graph, blocks, head, period)
        self.returned: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        self.second: dict[Node, Node] = {}
        self.carried: dict[Node, Node] = {}
        self.shared: set[Node] = set()
        self.unstable = reading_written_memory(module.graph)

    def run(self) -> Outline | str:
        nodes = [n for n in self.graph.nodes if n.op not in ("placeholder", "output")]
        head, body, rest = ([n for n in nodes if self.parts[n] == part] for part in range(3))
        if not body:
            return "no operator depends on the blocks"
        tail = self._pair(body, rest)
        if isinstance(tail, str):
            return tail
        if wrong := self._writes_shared(nodes):
            return wrong
        back = {second: first for first, second in self.second.items()}
        by_period = self._returned_by_periods()
        rest_of_results = list(self.returned)
        for first, second, _ in by_period:
            rest_of_results[first] = rest_of_results[second] = None
        computed = set(tail)
        passed = {
            i: node
            for i, node in enumerate(rest_of_results)
            if isinstance(node, Node) and node not in computed and node.op != "get_attr"
        }
        for i in passed:
            rest_of_results[i] = None
        # What the next period takes, what every one returns, and what is left of the last one.
        leaving = {*self.carried.values(), *(node for _, _, node in by_period)}
        tail_inputs = self._inputs(tail)
        for source in (*tail_inputs, *passed.values()):
            if source.op == "placeholder":
                if source in self.roles and self.parts[source] > 0 and source not in passed.values():
                    return f"{source.name} of a block is used after the blocks"
            elif self.parts[source] == 1:
                return f"{source.name} of a block that is not the last is used after the blocks"
            elif source in back:
                leaving.add(back[source])
        body_inputs = self._inputs(body)
        from_head = {*body_inputs, *tail_inputs, *passed.values()}
        return Outline(
            self._piece("Head", head, self._inputs(head), [n for n in head if n in from_head]),
            self._piece("Body", body, body_inputs, [n for n in body if n in leaving]),
            self._piece("Tail", tail, tail_inputs, rest_of_results),
            self.carried,
            {node: back[node] for node in (*tail_inputs, *passed.values()) if node in back},
            by_period,
            passed,
        )

    def _returned_by_periods(self) -> list[tuple[int, int, Node]]:
        """Results that both periods return: new keys and values of their layers."""
        positions = {node: i for i, node in reversed(list(enumerate(self.returned))) if isinstance(node, Node)}
        return [
            (i, positions[self.second[node]], node)
            for i, node in enumerate(self.returned)
            if isinstance(node, Node) and node in self.second and self.second[node] in positions
        ]

    # -- the second period -----------------------------------------------------------------------------------------

    def _pair(self, body: list[Node], rest: list[Node]) -> list[Node] | str:
        """Find the node of the second period for every node of the body; what is left is the tail."""
        position = 0
        skipped: list[Node] = []
        for node in body:
            start, held = position, len(skipped)
            while position < len(rest) and not self._same(node, rest[position]):
                skipped.append(rest[position])
                position += 1
            if position == len(rest):
                position = start
                del skipped[held:]
                other = next((n for n in skipped if self._same(node, n)), None)  # in another order
                if other is None:
                    return f"no operator of the next blocks does what {node.format_node()} does"
                skipped.remove(other)
            else:
                other = rest[position]
                position += 1
            self._note(node, other)
            self.second[node] = other
        order = {n: i for i, n in enumerate(rest)}
        return sorted(skipped + rest[position:], key=order.__getitem__)

    def _same(self, a: Node, b: Node) -> bool:
        """Whether ``b`` does in the second period what ``a`` does in the first."""
        if a.op != b.op or len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
            return False
        if not same_target(self.module, a, b):
            return False
        return same_tree((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)), self._same_input)

    def _same_input(self, a: Node, b: Node) -> bool:
        if a in self.second:
            return self.second[a] is b
        if a.op == "get_attr":
            return b.op == "get_attr" and same_target(self.module, a, b)
        role = self.roles.get(a)
        if role is not None and self.parts[a] == 1:
            return self.roles.get(b) == (role[0], role[1] + self.period)
        if self.parts[a] != 0:
            return False
        if a is b or self._equal(a, b):
            return a not in self.carried
        if a in self.carried:
            return self.carried[a] is b
        return a not in self.shared and self.parts.get(b) == 1 and b.op != "placeholder"

    def _equal(self, a: Node, b: Node) -> bool:
        """Whether two values from before the first period are the same: computed alike from memory nobody writes to."""
        if a is b:
            return True
        if a.op != "call_function" or b.op != "call_function" or self.parts[a] != 0 or self.parts[b] != 0:
            return False
        if a in self.unstable or b in self.unstable or a.target is not b.target:
            return False
        if "random" in a.meta or torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ()):
            return False
        return same_tree((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)), self._equal)

    def _note(self, a: Node, b: Node) -> None:
        """Note which values that enter the period are shared, and which are made by the period before."""
        for x, y in zip(_nodes_in(a), _nodes_in(b), strict=True):
            if self.parts[x] == 0 and x not in self.second and x.op != "get_attr":
                if x is y or self._equal(x, y):
                    self.shared.add(x)
                else:
                    self.carried[x] = y

    # -- the parts -------------------------------------------------------------------------------------------------

    def _writes_shared(self, nodes: list[Node]) -> str:
        """Memory that several blocks share must not be written to: the order of the parts could matter."""
        for node in nodes:
            for base in map(owner_of, written_by(node)):
                own = base in self.roles if base.op == "placeholder" else self.parts[base] == self.parts[node]
                if not own and self.parts[node] != 0:
                    return f"{node.format_node()} writes to memory that blocks share"
        return ""

    def _inputs(self, nodes: Sequence[Node]) -> list[Node]:
        """The values that some nodes take from elsewhere, in the order of the program."""
        inside = set(nodes)
        needed = {source for node in nodes for source in node.all_input_nodes if source not in inside}
        return [n for n in self.graph.nodes if n in needed and n.op != "get_attr"]

    def _piece(self, name: str, nodes: list[Node], inputs: list[Node], outputs: list[Any]) -> Piece:
        inside = {*nodes}
        constants = {
            source
            for source in (*(s for n in nodes for s in n.all_input_nodes), *outputs)
            if isinstance(source, Node) and source.op == "get_attr"
        }
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.graph.nodes:
            if node in inside or node in constants:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in outputs))
        return Piece(GraphModule(self.module, graph, class_name=name), inputs, list(outputs))


def parts_of(graph: Graph, blocks: Mapping[Node, Role], head: int, period: int) -> dict[Node, int]:
    """The part of every node: 0 the head, 1 the first period, 2 everything later."""
    last: dict[Node, int] = {}
    for node in graph.nodes:
        own = blocks[node][1] if node in blocks else -1
        last[node] = max([own, *(last[source] for source in node.all_input_nodes)])
    _sink(graph, last)
    _delay_writes(graph, last, head)
    return {node: 0 if block < head else 1 if block < head + period else 2 for node, block in last.items()}


def _sink(graph: Graph, last: dict[Node, int]) -> None:
    """A value that depends on no block and that one block alone uses belongs to that block.

    Every block has such operators of its own (a range, zeros, a view of the angles), and a rewrite may have merged some
    of them. Not those that read memory which the program writes to: they stay where they are.
    """
    unstable = reading_written_memory(graph)
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or last[node] >= 0 or node in unstable or not node.users or written_by(node):
            continue
        blocks = {last[user] if user.op != "output" else -1 for user in node.users}
        if len(blocks) == 1:
            last[node] = blocks.pop()


def reading_written_memory(graph: Graph) -> set[Node]:
    """Nodes that read memory which the program writes to: when they run matters."""
    written = {owner_of(target) for node in graph.nodes for target in written_by(node)}
    return {node for node in graph.nodes if any(owner_of(source) in written for source in node.all_input_nodes)}


def _delay_writes(graph: Graph, last: dict[Node, int], head: int) -> None:
    """A write that depends on no block, and comes after the first period has begun, comes after the blocks."""
    begun, end = False, max(last.values(), default=-1)
    delayed: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        begun = begun or last[node] >= head
        if last[node] < head and (any(n in delayed for n in node.all_input_nodes) or (begun and written_by(node))):
            delayed.add(node)
    for node in delayed:
        last[node] = end


def _nodes_in(node: Node) -> list[Node]:
    """The nodes among the arguments, in order, each as often as it is there."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def same_target(module: GraphModule, a: Node, b: Node) -> bool:
    """Whether two nodes call the same."""
    if a.target is b.target or (a.op == "call_function" and a.target == b.target):
        return True
    if a.op == "call_function":
        alike = getattr(a.target, "does_the_same_as", None)
        return bool(alike is not None and alike(b.target))
    if a.op == "get_attr":
        x, y = (_attribute(module, str(n.target)) for n in (a, b))
        if isinstance(x, GraphModule) and isinstance(y, GraphModule):
            return _same_graphs(x, y)
        same = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        return bool(same and x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))
    return False


def _same_graphs(a: GraphModule, b: GraphModule) -> bool:
    """Whether two graphs that others refer to call the same on the same."""
    pairs = dict(zip(a.graph.nodes, b.graph.nodes, strict=False))
    return len(a.graph.nodes) == len(b.graph.nodes) and all(
        x.op == y.op
        and x.op in ("placeholder", "call_function", "output")
        and (x.op == "placeholder" or x.target is y.target)
        and same_tree((x.args, dict(x.kwargs)), (y.args, dict(y.kwargs)), lambda m, n: pairs.get(m) is n)
        for x, y in pairs.items()
    )


def same_tree(a: Any, b: Any, same_node: Callable[[Node, Node], bool]) -> bool:
    """Whether two trees of arguments are equal, with nodes compared by ``same_node``."""
    if isinstance(a, Node) or isinstance(b, Node):
        return isinstance(a, Node) and isinstance(b, Node) and same_node(a, b)
    if isinstance(a, (list, tuple)):
        return (
            isinstance(b, (list, tuple))
            and len(a) == len(b)
            and all(same_tree(x, y, same_node) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_tree(a[k], b[k], same_node) for k in a)
    if isinstance(a, slice):
        parts = [(x.start, x.stop, x.step) for x in (a, b)] if isinstance(b, slice) else []
        return bool(parts) and same_tree(parts[0], parts[1], same_node)
    return type(a) is type(b) and bool(a == b or a != a)


def written_by(node: Node) -> list[Node]:
    """The nodes whose memory a node writes to."""
    if node.op != "call_function":
        return []
    if node.meta.get("writes"):
        return [n for n in node.args[:1] if isinstance(n, Node)]
    schema = schema_or_none(node.target)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, Node)]
    return found


def owner_of(node: Node) -> Node:
    """The node that owns the memory of a tensor, which may be a view of it or the result of a write into it."""
    while node.op == "call_function" and (is_view(node) or written_by(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part, None)
    return root
