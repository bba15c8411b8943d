"""``vmap`` inside a model.

Dynamo captures markers where a level begins and ends, and between them operators on tensors without the mapped
dimension. A trace before autograd would lose these operators; so each such section is traced separately, below
``vmap``, into operators on batched tensors, which then replace it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

_BEGIN, _END = "_vmap_increment_nesting", "_vmap_decrement_nesting"


@dataclass(eq=False)
class Section:
    """The nodes of one outermost ``vmap``, markers included."""

    nodes: list[Node] = field(default_factory=list)

    def inputs(self) -> list[Node]:
        """Nodes outside that the section uses."""
        inside = set(self.nodes)
        return list(dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in inside))

    def outputs(self) -> list[Node]:
        """Nodes of the section that are used outside."""
        inside = set(self.nodes)
        return [n for n in self.nodes if any(user not in inside for user in n.users)]

    def run(self, root: GraphModule, values: dict[Node, Any]) -> dict[Node, Any]:
        """Its outputs, computed from the values of its inputs by plain operators, without ``vmap``."""
        inputs, outputs = self.inputs(), self.outputs()
        graph, copies = Graph(), {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in outputs))
        body, arguments = GraphModule(root, graph), [values[node] for node in inputs]
        with disable_proxy_modes_tracing():
            plain = make_fx(Interpreter(body).run, _allow_non_fake_inputs=True)(*arguments)
        return dict(zip(outputs, Interpreter(plain).run(*arguments), strict=True))


def find_sections(graph: Graph) -> dict[Node, Section]:
    """The section of every node that is in one."""
    found: dict[Node, Section] = {}
    depth, current = 0, Section()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == _BEGIN:
            if depth == 0:
                current = Section()
            depth += 1
        if depth:
            current.nodes.append(node)
            found[node] = current
        if name == _END:
            depth -= 1
    return found
