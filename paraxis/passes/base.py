"""What a pass is, and how passes form a pipeline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from ..config import Config
from ..context import ParallelExecutionCtx
from .setting import Setting, setting_of

Observer = Callable[["PassBase", GraphModule], None]
"""Called after every pass that ran, with the graph that it returned."""


class PassBase(ABC):
    """A step from graph module to graph module.

    Subclasses implement :meth:`run`, and :meth:`applies` if the pass is not for every program. Calling the pass runs it
    and, if it may have changed the graph and the config asks for it, lints and recompiles.
    """

    name: str = ""
    """What the pass is called in a pipeline; by default the name of its class."""

    need_rerun_when_recompile: bool = True
    """Whether later captures run this pass again."""

    changes_graph: bool = True
    """Whether it may change the graph, which is then linted and recompiled."""

    @classmethod
    def signature(cls) -> str:
        """The name of the class."""
        return cls.__name__

    @property
    def title(self) -> str:
        """What the pass is called in a pipeline."""
        return self.name or self.signature()

    @property
    def summary(self) -> str:
        """One line of what the pass does."""
        return (type(self).__doc__ or "").strip().split("\n")[0]

    def applies(self, setting: Setting) -> bool:
        """Whether the pass is for a program that is built in this setting."""
        return True

    @abstractmethod
    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Process ``graph_module`` and return it, or another one in its place."""

    def __call__(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        if not self.need_rerun_when_recompile and ctx.compile_times > 0:
            return graph_module
        graph_module = self.run(graph_module, ctx=ctx, config=config)
        if config.lint_and_recompile and self.changes_graph:
            graph_module.graph.lint()
            graph_module.recompile()
        return graph_module


class AnalyzeBase(PassBase):
    """A pass that only analyzes: it does not change the graph, and stores its findings in ``node.meta``."""

    changes_graph = False

    @classmethod
    def meta_key(cls) -> str:
        """The key of the findings in ``node.meta``: the name of the pass."""
        return cls.signature()

    @classmethod
    def already_executed_per_node(cls, node: Node) -> bool:
        """Whether the pass has left a finding on a node."""
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
        """Leave a finding on a node, once."""
        if self.already_executed_per_node(node):
            raise RuntimeError(f"node {node} was already marked by {self.signature()}; it must run once per graph")
        node.meta[self.meta_key()] = info

    def clear_marker_per_node(self, node: Node) -> None:
        """Remove the finding from a node."""
        node.meta.pop(self.meta_key(), None)

    def clean_all(self, graph_module: GraphModule) -> None:
        """Remove the findings from all nodes."""
        for node in graph_module.graph.nodes:
            self.clear_marker_per_node(node)


class Rewrite(PassBase):
    """A rewrite of the local program by a function, with its name, when it applies and one line of what it does.

    The function changes the graph module in place and takes care of recompiling it, or returns another one.
    """

    def __init__(
        self,
        name: str,
        does: str,
        function: Callable[[GraphModule, Setting], Any],
        when: Callable[[Setting], bool] = lambda setting: True,
        searching: bool = False,
    ) -> None:
        """``searching``: whether it also applies while a plan is searched, because the plan shows its effect."""
        self.name, self._does, self._function, self._when = name, does, function, when
        self._searching = searching

    @property
    def summary(self) -> str:
        """One line of what the rewrite does."""
        return self._does

    def applies(self, setting: Setting) -> bool:
        """Whether the rewrite is for a program that is built in this setting."""
        return (self._searching or not setting.searching) and self._when(setting)

    def run(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Apply the function."""
        result = self._function(graph_module, setting_of(graph_module, ctx, config))
        return result if isinstance(result, GraphModule) else graph_module

    def __call__(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        # The function has recompiled what it changed; doing so again for every rewrite would cost more than most.
        return self.run(graph_module, ctx, config)


Which = type[PassBase] | str
"""A pass of a pipeline: its class, or its name."""


class PassPipeline:
    """Passes in the order in which they run.

    A pipeline can be changed before it is used: ``pipeline.append(MyPass())``,
    ``pipeline.insert_before("lift", MyPass())``, ``pipeline.remove("merge_all_reduces")``,
    ``pipeline.move_after("cpu_matmul", "append_kv_cache")``.
    """

    def __init__(self, passes: Sequence[PassBase] = ()) -> None:
        self._passes = list(passes)

    def __iter__(self) -> Iterator[PassBase]:
        return iter(self._passes)

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def names(self) -> list[str]:
        """The names of the passes, in order."""
        return [step.title for step in self._passes]

    def index(self, which: Which) -> int:
        """The position of the first pass of a class or name."""
        for i, step in enumerate(self._passes):
            if step.title == which or (isinstance(which, type) and isinstance(step, which)):
                return i
        raise ValueError(f"no pass {which!r} in the pipeline; it has {', '.join(self.names)}")

    def __contains__(self, which: object) -> bool:
        try:
            self.index(which)  # type: ignore[arg-type]
        except ValueError:
            return False
        return True

    def append(self, new: PassBase) -> None:
        """Put a pass at the end."""
        self._passes.append(new)

    def insert_after(self, after: Which, new: PassBase) -> None:
        """Put a pass behind another."""
        self._passes.insert(self.index(after) + 1, new)

    def insert_before(self, before: Which, new: PassBase) -> None:
        """Put a pass in front of another."""
        self._passes.insert(self.index(before), new)

    def remove(self, which: Which) -> PassBase:
        """Take a pass out, and return it."""
        return self._passes.pop(self.index(which))

    def move_after(self, which: Which, after: Which) -> None:
        """Let a pass run right after another one."""
        self.index(after)
        self.insert_after(after, self.remove(which))

    def run(
        self,
        graph_module: GraphModule,
        ctx: ParallelExecutionCtx,
        config: Config,
        *,
        start: Which | None = None,
        stop: Which | None = None,
        observer: Observer | None = None,
    ) -> GraphModule:
        """Run the passes that apply, from ``start`` until before ``stop``; both may be absent from the pipeline.

        The seconds of each are added up in ``ctx.state.pass_seconds``.
        """
        first = self.index(start) if start is not None and start in self else 0
        last = self.index(stop) if stop is not None and stop in self else len(self._passes)
        for step in self._passes[first:last]:
            if not step.applies(setting_of(graph_module, ctx, config)):
                continue
            started = time.perf_counter()
            graph_module = step(graph_module, ctx=ctx, config=config)
            seconds = ctx.state.pass_seconds
            seconds[step.title] = seconds.get(step.title, 0.0) + time.perf_counter() - started
            if observer is not None:
                observer(step, graph_module)
        return graph_module

    def __call__(self, graph_module: GraphModule, ctx: ParallelExecutionCtx, config: Config) -> GraphModule:
        """Run all passes, and remove the findings of those that only analyze."""
        captured = graph_module
        graph_module = self.run(graph_module, ctx, config)
        if config.clean_markers_after_all_passes:
            self.clean(captured)
        return graph_module

    def clean(self, captured: GraphModule) -> None:
        """Remove the findings of all analyses from a captured graph."""
        for step in self._passes:
            if isinstance(step, AnalyzeBase):
                step.clean_all(captured)
