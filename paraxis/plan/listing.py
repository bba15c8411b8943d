"""The local program of one rank as readable Python.

Every line is an operator on this rank's tensors, with a comment for the local shape and the placement of the global
tensor. Lines are grouped by the module they come from, and collectives are marked.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..compat.dynamo import buffer_of
from ..compat.torch import OpOverload, packet_name
from ..distributed.operators import COLLECTIVES
from ..graph.local_program import COLLECTIVE, FULL
from ..graph.nodes import module_of
from ..placement import Partial, Placement, Shard, local_shape
from ..tensor.sharded_tensor import unwrap
from .offline import LOCAL_PROGRAM, Planned

COMMENT_COLUMN = 88
"""Where comments begin, unless the line is longer."""
RESULT_NAMES = {"all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "scattered"}
"""What the result of a collective is called in the listing."""


def list_program(planned: Planned, after: str = LOCAL_PROGRAM) -> str:
    """The program of the simulated rank after a pass of the pipeline. It parses as Python but cannot be executed."""
    return _Listing(planned, planned.program(after)).text()


class _Listing:
    """Writes one program; names its values after operators and layers, numbered where they repeat."""

    def __init__(self, planned: Planned, program: GraphModule) -> None:
        self.planned, self.ctx, self.module = planned, planned.ctx, program
        self.names: dict[Node, str] = {}
        self.used: Counter[str] = Counter()
        known = planned.solved.parameters.items()
        self.parameters = {str(node.meta["origin"].target): parameter.name for node, parameter in known}

    def text(self) -> str:
        rank, world = self.ctx.rank, self.ctx.world_size
        lines = [
            f"# The local program of rank {rank} of {world}. Comments: local shape, placement of the global tensor.",
            "",
        ]
        inputs = []
        for node in self.module.graph.find_nodes(op="placeholder"):
            if str(node.target) in self.parameters:
                continue
            buffer = buffer_of(str(node.target))
            if buffer is not None:
                self.names[node] = f"buffers[{buffer!r}]"
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
        """The module that a line belongs to; a collective belongs to the module that computed its input."""
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
        return f"{code:<{COMMENT_COLUMN}}  # {comment}" if comment else code

    def _called(self, node: Node) -> str:
        if node.op == "call_module":
            return f"{type(self.module.get_submodule(str(node.target))).__name__}[{str(node.target)!r}]"
        if isinstance(node.target, OpOverload):
            return f"{node.target.namespace}.{packet_name(node.target)}"
        return str(getattr(node.target, "__name__", node.target))

    def _comment(self, node: Node) -> str:
        placements, value = node.meta.get("placement"), node.meta.get(FULL, node.meta.get("val"))
        comments = []
        if isinstance(value, torch.Tensor) and placements:
            shape = ", ".join(map(str, local_shape(placements[0], tuple(value.shape), self.ctx.rank)))
            comments.append(f"{str(value.dtype).removeprefix('torch.')}[{shape}] {_placement_text(placements[0])}")
        if node.op == "call_function" and node.target in COLLECTIVES:
            collective = node.meta.get(COLLECTIVE)
            why = collective.reason if collective is not None else ""
            comments.append(f"<== COLLECTIVE{': ' + why if why else ''}")
        if node.op == "call_module":
            parameter = self.planned.plan.parameters.get(f"{node.target}.weight")
            if parameter is not None:
                local = local_shape(parameter.placement, parameter.global_shape, self.ctx.rank)
                comments.append(f"weight {list(local)} of {list(parameter.global_shape)}")
        return "; ".join(comments)

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
        name = f"{name}_" if keyword.iskeyword(name) else f"arg{name}" if name[0].isdigit() else name
        self.used[name] += 1
        return name if self.used[name] == 1 else f"{name}_{self.used[name]}"

    def _others(self) -> list[str]:
        """The blocks that are left out because they repeat others; neighbours on one line."""
        lines = []
        for each in self.planned.repeated:
            runs: list[tuple[int, int, int]] = []
            for index, like in sorted(each.like.items()):
                if runs and runs[-1][1:] == (index - 1, like):
                    runs[-1] = (runs[-1][0], index, like)
                else:
                    runs.append((index, index, like))
            for first, last, like in runs:
                blocks = f"{each.path}.{first}"
                blocks = f"{blocks} to {each.path}.{last} repeat" if last > first else f"{blocks} repeats"
                lines.append(f"# {blocks} {each.path}.{like}.")
        return lines


def _short(node: Node) -> str:
    """A name for the result of a node: that of the operator, or the last part of the layer's name."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[2]
    if node.target in COLLECTIVES:
        return RESULT_NAMES[COLLECTIVES[node.target]]
    if isinstance(node.target, OpOverload):
        return packet_name(node.target)
    return str(getattr(node.target, "__name__", node.name))


def _placement_text(placement: Placement) -> str:
    """A placement in the notation of DTensor."""
    if isinstance(placement, Partial):
        return "Partial"
    if isinstance(placement, Shard) and placement.layouts:
        return f"Shard({', '.join(str(dim) for dim, _ in placement.layouts)})"
    return "Replicate"
