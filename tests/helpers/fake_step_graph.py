"""A stand-in for the CUDA graph of a decode step, on the CPU: capture notes what a step does and undoes it, and replay
does that again, on the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from paraxis.compat.torch import TorchDispatchMode, disable_dispatch_modes, pytree
from paraxis.runtime.generation import install, step_graph

WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten._unique2.default)
"""Operators for which the host waits: no graph can contain them."""


class Tape(TorchDispatchMode):
    """Notes operators and programs with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.entries.append((func, args, kwargs or {}, result))
        return result

    def run(self) -> None:
        """Do it all again, into the same results."""
        for func, args, kwargs, results in self.entries:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Steps:
    """What happened to steps: how many were captured and replayed, and how many called the model."""

    def __init__(self) -> None:
        self.captures = self.replays = self.calls = self.refused = 0
        self.tape: Tape | None = None

    def execute(self, program: Any, shards: list[Any], inputs: list[Any]) -> Any:
        """Run a program; while a step is captured, as one operator."""
        if self.tape is None:
            return program(*shards, *inputs)
        with disable_dispatch_modes():
            results = program(*shards, *inputs)
        self.tape.entries.append((partial(program, *shards, *inputs), (), {}, results))
        return results

    def forget(self) -> tuple[int, int, int]:
        """(captures, replays, calls) so far, which are zero afterwards."""
        found = self.captures, self.replays, self.calls
        self.captures = self.replays = self.calls = 0
        return found


class FakeCapture:
    """In place of :class:`paraxis.runtime.generation.step_graph.CapturedStep`."""

    def __init__(self, steps: Steps, runs: list[Any], step: Any, pool: Any) -> None:
        assert pool == "the pool"
        self.steps, state = steps, runs[-1].state
        memory = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
        memory += [x for pair in state._storages for x in pair]
        before, drawn = [x.clone() for x in memory], torch.get_rng_state()
        self.tape = steps.tape = Tape()
        try:
            with self.tape:
                self.results = step()
        except RuntimeError:
            steps.refused += 1
            raise
        finally:
            steps.tape = None
            for x, old in zip(memory, before, strict=True):
                x.copy_(old)
            torch.set_rng_state(drawn)
        steps.captures += 1

    def replay(self) -> None:
        self.steps.replays += 1
        self.tape.run()


@contextmanager
def fake_step_graphs(model: Any, runs: list[Any]) -> Iterator[Steps]:
    """Inside, decode steps of the generation loop are captured by fakes; ``runs`` are those of ``generation_loop``."""
    steps = Steps()
    forward = model.forward.leads_in
    call = type(forward).__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.calls += 1
        return call(self, *args, **kwargs)

    with (
        patch.object(install, "captures_steps", lambda *args: True),
        patch.object(install, "pool_of", lambda ctx: "the pool"),
        patch.object(step_graph, "CapturedStep", partial(FakeCapture, steps, runs)),
        patch.object(step_graph, "execute", steps.execute),
        patch.object(type(forward), "__call__", counted),
    ):
        yield steps
