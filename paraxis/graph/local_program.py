"""What a local program carries besides its graph: the collectives, their order, its random state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule, Node

from ..compat.torch import higher_order_name

if TYPE_CHECKING:
    from ..distributed.random import RandomState

INFO = "paraxis_local_program"
"""Where a local program has it: ``graph_module.meta[INFO]``."""

REGION = "region"
"""In ``node.meta``: the checkpointed region that a node is of."""

COLLECTIVE = "collective"
"""In ``node.meta`` of a redistribution: its :class:`Collective`."""

FULL = "full_val"
"""In ``node.meta`` of a redistribution: the fake of the global tensor."""


@dataclass
class Collective:
    """One collective of the forward program; ``module`` is where the tensor was computed that it communicates."""

    kind: str
    module: str
    shape: tuple[int | None, ...]
    dtype: str
    reason: str = ""


@dataclass
class ProgramInfo:
    """What is known of a local program.

    Attributes:
        collectives: Those of the forward, in order.
        order: What the ranks must do in the same order: layers, redistributions, random draws.
        fingerprint: What must be equal on all ranks, in any order: placements of parameters and results, operators and
            shapes.
        constants: Operators with the numbers that they are called with, and the gradients that are computed, which must
            be equal on all ranks, in any order.
        random: What its random operators draw from, if it has any.
        inputs: The (fake) values that the graph was captured with, one for each placeholder.
        parameters: The sharded parameters, by the placeholder that brings them in.
        dynamic: Whether some input is a symbolic size, so that the program cannot be captured as a CUDA graph.
    """

    collectives: list[Collective] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    fingerprint: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    random: RandomState | None = None
    inputs: list[Any] = field(default_factory=list)
    parameters: dict[Any, nn.Parameter] = field(default_factory=dict)
    dynamic: bool = False


def info_of(program: GraphModule) -> ProgramInfo:
    """The information that partitioning has left with a local program."""
    info = program.meta.get(INFO)
    if not isinstance(info, ProgramInfo):
        raise RuntimeError("this graph is not a local program yet: run ParallelLayerReplacePass first")
    return info


def draws_random(program: GraphModule) -> bool:
    """Whether the program draws random numbers, such as those of dropout."""
    info = program.meta.get(INFO)
    if not isinstance(info, ProgramInfo) or info.random is None:
        return False
    return any("random" in node.meta for node in program.graph.nodes)


def region_of(captured: Node | None) -> str | None:
    """The name of the checkpointed region that a captured node is, if it is one."""
    is_region = captured is not None and higher_order_name(captured.target) == "tag_activation_checkpoint"
    return captured.name if is_region and captured is not None else None
