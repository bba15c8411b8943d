"""One CUDA graph for a full decode step: the forward, the choice of the tokens, and what the host will look at.

A step runs one compiled program, on tensors that are the same in every step, and some small operators after it. When
the same program has run twice on the same memory, the next step is captured; steps from then on replay the graph. Their
host time is that of a launch: no guards, no Python code of the model, no launch per kernel.

A graph must never be replayed where the model would do something else. So

- the first step of every ``generate`` calls the model, with all of its guards. If it comes to the program of a graph,
  with the shards and inputs of the capture, that program does not run: the graph does;
- within a call of ``generate``, a graph is not replayed any more when somebody has registered a hook, a module or a
  parameter, or has replaced a shard;
- a model is captured only if its call is this one program: no hooks, no Python code beside it, no attribute that it
  sets.

Graphs belong to the tensors of their steps (:class:`.DecodeState`), and stay with these for the next ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import nn

from ...compat.torch import dispatch_mode_depth, has_module_hooks
from ...tensor.sharded_tensor import shards_version
from ..model_watch import registrations
from ..program_runs import Program, ProgramRun, execute
from .fixed_choice import FixedChoice

MAX_GRAPHS = 3
"""Graphs of one state: steps with other ways to choose a token, or of another program, are graphs of their own."""

Step = Callable[[], Any]


class CapturedStep:
    """A CUDA graph of a step.

    Args:
        step: The step. It is captured, which does not run it.
        pool: The memory pool, by :func:`paraxis.runtime.cuda_graphs.pool_of`.
    """

    def __init__(self, step: Step, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Draws of the default generator are captured as draws: each replay advances it as a step does.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.results = step()

    def replay(self) -> None:
        """Run the step. The results are in the same tensors each time."""
        self._graph.replay()


class StepGraph:
    """A captured step.

    Args:
        run: The run of its program.
        program_results: What the program has returned in the capture.
        captured: The graph.
        choice: What chooses the tokens in it; None if the graph ends with the logits.
    """

    def __init__(self, run: ProgramRun, program_results: Any, captured: Any, choice: FixedChoice | None) -> None:
        self.run, self.program_results, self.captured, self.choice = run, program_results, captured, choice

    def replay(self) -> Any:
        """Run the step: the logits and the scores, or the logits of the forward if there is no choice. In tensors that
        the next replay overwrites."""
        self.captured.replay()
        return self.captured.results


class StepObserver:
    """Notes which programs a step runs, and skips the program of a graph that stands for the step.

    Args:
        graphs: The graphs that may stand for it.
    """

    def __init__(self, graphs: Iterable[StepGraph] = ()) -> None:
        self.graphs = list(graphs)
        self.found: StepGraph | None = None
        """The graph that stands for the step: its program has not run."""
        self.runs: list[ProgramRun] = []
        self.program_results: Any = None

    def __call__(self, program: Program, shards: list[torch.Tensor], inputs: list[Any]) -> Any:
        """Run a program, or return the results that it has in the graph."""
        if self.found is not None:
            raise RuntimeError("a decode step that is one program has run a second one")
        for graph in self.graphs if not self.runs else ():
            if graph.run.is_again(program, shards, inputs):
                self.found = graph
                return graph.program_results
        self.runs.append(ProgramRun(program, shards, inputs))
        self._last = program, shards, inputs
        self.program_results = execute(program, shards, inputs)
        return self.program_results

    def is_again(self, run: ProgramRun | None) -> bool:
        """Whether the step has run one program, and ``run`` was the same."""
        return run is not None and len(self.runs) == 1 and run.is_again(*self._last)


def changes_seen() -> Any:
    """A value that changes when somebody registers a hook, a module or a parameter, or replaces a shard."""
    return registrations(), shards_version()


def is_one_program(model: Any) -> bool:
    """Whether a call of the model is one compiled program, as far as can be told before it: no Python code around it,
    and nobody who watches operators."""
    call = getattr(model.__dict__.get("forward"), "leads_in", None)
    return (
        call is not None
        and not call.fell_back
        and not call.hooked
        and not has_module_hooks(model)
        and type(model).__call__ is nn.Module.__call__
        and dispatch_mode_depth() == 0
    )


class Attributes:
    """All attributes of a model's modules and of the layers of a KV cache, before a step.

    A replay sets none, so a step that does cannot be one.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        owners = [*model.modules(), cache, *cache.layers]
        self._dicts = [vars(owner) for owner in owners]
        self._dicts += [d for m in model.modules() for d in (m._parameters, m._buffers, m._modules)]
        self._values = [list(d.values()) for d in self._dicts]

    def unchanged(self) -> bool:
        """Whether they are the same objects still."""
        return all(
            len(d) == len(values) and all(map(is_, d.values(), values))
            for d, values in zip(self._dicts, self._values, strict=True)
        )
