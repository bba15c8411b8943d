"""When a captured step stands for a step, what ends that, and how it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paraxis.placement import REPLICATE
from paraxis.runtime.generation.step_graph import (
    Attributes,
    CapturedStep,
    StepGraph,
    StepObserver,
    changes_seen,
    is_one_program,
)
from paraxis.runtime.model_watch import ModelWatch
from paraxis.runtime.program_runs import ProgramRun
from paraxis.tensor.sharded_tensor import ShardedTensor, ShardSpec, convert_shard


def program(*args: Any) -> list[Any]:
    return [sum(args)]


SHARDS, TOKEN = [torch.ones(2)], torch.zeros(1)
KNOWN = StepGraph(ProgramRun(program, SHARDS, [TOKEN]), ["captured"], SimpleNamespace(replay=None), None)


def test_the_program_of_a_captured_step_does_not_run() -> None:
    observer = StepObserver([KNOWN])
    assert observer(program, SHARDS, [TOKEN]) == ["captured"] and observer.found is KNOWN and not observer.runs
    with pytest.raises(RuntimeError, match="a second one"):
        observer(program, SHARDS, [TOKEN])


def test_other_programs_run_and_are_noted() -> None:
    other = torch.ones(1)
    observer = StepObserver([KNOWN])
    assert torch.equal(observer(program, SHARDS, [other])[0], SHARDS[0] + 1)
    assert observer.found is None and observer.is_again(ProgramRun(program, SHARDS, [other]))
    assert not observer.is_again(KNOWN.run) and not observer.is_again(None)
    observer(program, SHARDS, [TOKEN])
    assert observer.found is None, "a step that began otherwise"
    assert not observer.is_again(observer.runs[0]), "two programs"


class Model(nn.Module):
    """As much of a parallel model as a step looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.call = SimpleNamespace(fell_back=False, hooked=False)
        self.forward = lambda x: x
        self.forward.leads_in = self.call  # type: ignore[attr-defined]


def test_a_plain_call_is_one_program() -> None:
    model = Model()
    assert is_one_program(model)
    handle = model.register_forward_hook(lambda *args: None)
    assert not is_one_program(model)
    handle.remove()
    assert is_one_program(model)
    with FlopCounterMode(display=False):
        assert not is_one_program(model), "somebody counts operators"


@pytest.mark.parametrize("what", ["fell_back", "hooked"])
def test_python_code_is_no_program(what: str) -> None:
    model = Model()
    setattr(model.call, what, True)
    assert not is_one_program(model)


def test_a_forward_that_somebody_has_put_there_is_no_program() -> None:
    model = Model()
    own = model.forward
    model.forward = lambda x: own(x) + 1
    assert not is_one_program(model)


def test_registrations_and_new_shards_are_seen() -> None:
    model = Model()
    ModelWatch(model, torch_modules=True)
    parameter = ShardedTensor(torch.ones(2), ShardSpec(REPLICATE, None), (2,))
    seen = [changes_seen()]
    assert changes_seen() == seen[0]
    model.part.register_forward_pre_hook(lambda *args: None)
    seen.append(changes_seen())
    model.part.weight = nn.Parameter(torch.ones(2, 2))
    seen.append(changes_seen())
    convert_shard(parameter, torch.Tensor.double)
    seen.append(changes_seen())
    assert len(set(seen)) == 4


def test_attributes_that_a_step_sets_are_seen() -> None:
    model, cache = Model(), SimpleNamespace(layers=[SimpleNamespace(keys=TOKEN)])
    before = Attributes(model, cache)
    TOKEN.add_(1)
    assert before.unchanged()
    model.part.seen = TOKEN  # type: ignore[assignment]
    assert not before.unchanged()
    before = Attributes(model, cache)
    cache.layers[0].keys = TOKEN.clone()
    assert not before.unchanged()
    before = Attributes(model, cache)
    model.register_buffer("counter", TOKEN)
    assert not before.unchanged()


def test_capture_uses_the_common_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, capturing = [], []

    @contextmanager
    def capture(graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert pool == "the pool" and capture_error_mode == "thread_local"
        capturing.append(graph)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replayed.append(1)))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    captured = CapturedStep(lambda: len(capturing), "the pool")
    graph = StepGraph(KNOWN.run, None, captured, None)
    assert graph.replay() == graph.replay() == 1, "the results of the capture"
    assert len(replayed) == 2
