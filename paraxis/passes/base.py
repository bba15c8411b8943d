"""What a pass is, and how passes form a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from ..config import Config
from ..context import ParallelExecutionCtx


class PassBase(ABC):
    """A step from graph module to graph module.

    Subclasses implement :meth:`run`. Calling the pass runs it and, if the config asks for it, lints and recompiles.
    """

    need_rerun_when_recompile: bool = True
    """Whether later captures run this pass again."""

    @classmethod
    def signature(cls) -> str:
        return cls.__name__

    @abstractmethod
    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Process ``graph_module`` and return it, or another one in its place."""

    def __call__(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        if not self.need_rerun_when_recompile and ctx.compile_times > 0:
            return graph_module
        graph_module = self.run(graph_module, ctx=ctx, config=config)
        if config.lint_and_recompile:
            graph_module.graph.lint()
            graph_module.recompile()
        return graph_module


class AnalyzeBase(PassBase):
    """A pass that only looks: it leaves the graph as it is and its findings in ``node.meta``, under its own name."""

    @classmethod
    def meta_key(cls) -> str:
        return cls.signature()

    @classmethod
    def already_executed_per_node(cls, node: Node) -> bool:
        return cls.meta_key() in node.meta

    @classmethod
    def get_stored_field_info(cls, node: Node, field: Any, must_have: bool = False) -> Any:
        """A finding about a node; None, or an error if it is required, when there is none."""
        info = node.meta.get(cls.meta_key())
        if info is None:
            if must_have:
                raise RuntimeError(f"{cls.__name__} has left nothing on node `{node}`; run it first")
            return None
        if field not in info and must_have:
            raise KeyError(f"{cls.__name__} has no field {field!r}; it has {sorted(info)}")
        return info.get(field)

    def place_marker_per_node(self, node: Node, info: dict[Any, Any]) -> None:
        if self.already_executed_per_node(node):
            raise RuntimeError(f"node {node} was already marked by {self.signature()}; it must run once per graph")
        node.meta[self.meta_key()] = info

    def clear_marker_per_node(self, node: Node) -> None:
        node.meta.pop(self.meta_key(), None)

    def clean_all(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            self.clear_marker_per_node(node)


class PassPipeline:
    """Passes run one after the other. A pipeline can be changed before it is used: ``pipeline.append(MyPass())``."""

    def __init__(self, passes: Sequence[PassBase] = ()) -> None:
        self._passes = list(passes)

    def __iter__(self) -> Any:
        return iter(self._passes)

    def append(self, new: PassBase) -> None:
        self._passes.append(new)

    def insert_after(self, after: type[PassBase], new: PassBase) -> None:
        """Put a pass behind the first one of a type."""
        position = next(i for i, p in enumerate(self._passes) if isinstance(p, after))
        self._passes.insert(position + 1, new)

    def __call__(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        captured = graph_module
        for step in self._passes:
            graph_module = step(graph_module, ctx=ctx, config=config)
        if config.clean_markers_after_all_passes:
            for step in self._passes:
                if isinstance(step, AnalyzeBase):
                    step.clean_all(captured)
        return graph_module
