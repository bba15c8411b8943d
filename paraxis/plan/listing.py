"""The local program of one rank as Python that a person can read.

Every line is an operator on this rank's tensors, with its local shape and where the whole tensor is as a comment; lines
are grouped by the module that they come from, and collectives stand out.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from typing import Any

import torch
from torch.fx import Node

from ..graph.nodes import module_of
from ..placement import Partial, Placement, Replicate, Shard, local_shape
from ..tensor.sharded_tensor import unwrap
from .make import Planned

COLUMN = 88
"""Where comments begin, if the line leaves room."""
COLLECTIVES = {
    "all_reduce": "summed",
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_to_all": "exchanged",
    "sum_together": "summed",
}
"""What brings tensors of several ranks together, and what its result is called."""


def list_program(planned: Planned) -> str:
    """The local program of the rank that a plan was imagined for. It parses as Python, and runs nowhere."""
    return _Listing(planned).text()


class _Listing:
    def __init__(self, planned: Planned) -> None:
        self.planned, self.ctx = planned, planned.ctx
        assert self.ctx.last_optimized_graph_module is not None
        self.module = self.ctx.last_optimized_graph_module
        self.names: dict[Node, str] = {}
        self.used: Counter[str] = Counter()
        known = planned.solved.parameters.items()
        self.parameters = {str(node.meta["origin"].target): parameter.name for node, parameter in known}
        self.reasons = {(c.kind, c.module): c.reason for c in planned.plan.collectives}

    def text(self) -> str:
        rank, world = self.ctx.rank, self.ctx.world_size
        lines = [
            f"# The program of rank {rank} of {world}. Comments: the shape on this rank, and how the tensor is split.",
            "",
        ]
        inputs = []
        for node in self.module.graph.find_nodes(op="placeholder"):
            if str(node.target) in self.parameters:
                continue
            held = re.fullmatch(r"L_model_modules_(.*)_buffers_(.*?)_*", str(node.target))
            if held:
                path = ".".join(held[1].split("_modules_"))
                self.names[node] = f"buffers[{f'{path}.{held[2]}'!r}]"
                continue
            inputs.append(node)
            self.names[node] = self._fresh(re.sub(r"^l_(kwargs_|args_)?", "", node.name.lower()).strip("_"))
        lines.append(f"def forward({', '.join(self.names[node] for node in inputs)}):")
        where = None
        for node in self.module.graph.nodes:
            if node.op == "placeholder" or node.target is unwrap:
                continue
            place = self._place(node)
            if place != where and node.op not in ("output", "get_attr"):
                lines += ["", f"    # {place or 'the model'}"]
                where = place
            lines.append(self._line(node))
        return "\n".join([*lines, *self._others(), ""])

    def _place(self, node: Node) -> str:
        """The module that a line belongs to; what moves a tensor belongs to the one that made it."""
        while "nn_module_stack" not in node.meta and node.all_input_nodes:
            node = node.all_input_nodes[0]
        place = module_of(node)
        # a layer is a line of the module that calls it
        return place.rpartition(".")[0] if node.op == "call_module" and place == str(node.target) else place

    def _line(self, node: Node) -> str:
        if node.op == "output":
            return f"    return {self._value(node.args[0])}"
        name = self._fresh(_short(node))
        arguments = [self._value(a) for a in node.args] + [f"{k}={self._value(v)}" for k, v in node.kwargs.items()]
        code = f"    {name} = {self._called(node)}({', '.join(arguments)})"
        if node.op == "get_attr":
            code = f"    {name} = constants.{node.target}"
        self.names[node] = name
        comment = self._comment(node)
        return f"{code:<{COLUMN}}  # {comment}" if comment else code

    def _called(self, node: Node) -> str:
        if node.op == "call_module":
            return f"{type(self.module.get_submodule(str(node.target))).__name__}[{str(node.target)!r}]"
        if isinstance(node.target, torch._ops.OpOverload):
            return f"{node.target.namespace}.{node.target._opname}"
        return str(getattr(node.target, "__name__", node.target))

    def _comment(self, node: Node) -> str:
        placements, value = node.meta.get("placement"), node.meta.get("val")
        moved = getattr(node.target, "__name__", "") in COLLECTIVES
        source = node.all_input_nodes[0] if moved and node.all_input_nodes else node
        value = source.meta.get("val") if moved else value
        parts = []
        if isinstance(value, torch.Tensor) and placements:
            shape = ", ".join(map(str, local_shape(placements[0], tuple(value.shape), self.ctx.rank)))
            parts.append(f"{str(value.dtype).removeprefix('torch.')}[{shape}] {_words(placements[0])}".strip())
        if moved:
            why = self.reasons.get((str(getattr(node.target, "__name__", "")), module_of(source)), "")
            parts.append(f"<== COLLECTIVE{': ' + why if why else ''}")
        if node.op == "call_module":
            known = self.planned.plan.parameters.get(f"{node.target}.weight")
            if known is not None:
                mine = local_shape(known.placement, known.global_shape, self.ctx.rank)
                parts.append(f"weight {list(mine)} of {list(known.global_shape)}")
        return "; ".join(parts)

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            if value.target is unwrap:
                value = value.args[0]
            if value not in self.names:
                return f"weights[{self.parameters.get(str(value.target), str(value.target))!r}]"
            return self.names[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._value(item) for item in value)
            comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{comma})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, torch.device):
            return repr(str(value))
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return (
                "float('inf')" if value == float("inf") else "-float('inf')" if value == -float("inf") else repr(value)
            )
        return repr(str(value))

    def _fresh(self, name: str) -> str:
        name = re.sub(r"\W", "_", name) or "x"
        name = f"{name}_" if keyword.iskeyword(name) or name[0].isdigit() else name
        self.used[name] += 1
        return name if self.used[name] == 1 else f"{name}_{self.used[name]}"

    def _others(self) -> list[str]:
        """The blocks that are not in the program because they are like others; neighbours in one line."""
        lines = []
        for each in self.planned.repeated:
            runs: list[tuple[int, int, int]] = []
            for index, like in sorted(each.like.items()):
                if runs and runs[-1][1:] == (index - 1, like):
                    runs[-1] = (runs[-1][0], index, like)
                else:
                    runs.append((index, index, like))
            for first, last, like in runs:
                some = f"{each.path}.{first} to {each.path}.{last} run" if last > first else f"{each.path}.{first} runs"
                lines.append(f"# {some} as {each.path}.{like} does.")
        return lines


def _short(node: Node) -> str:
    """A name for the result of an operator: that of the operator, or the last part of a layer's."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[2]
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname
    name = str(getattr(node.target, "__name__", node.name))
    return COLLECTIVES.get(name, name)


def _words(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "partial sums"
    if isinstance(placement, Replicate) or not isinstance(placement, Shard) or not placement.layouts:
        return ""
    return "split on " + ", ".join(f"dimension {d}" for d, _ in placement.layouts)
