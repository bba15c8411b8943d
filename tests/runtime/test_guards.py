"""Which of Dynamo's guards stay, and what is noticed of a model besides them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.source import AttrSource, GlobalSource, LocalSource, TypeSource
from torch._guards import GuardSource

from paraxis.runtime.guards import attributes_read, needed_guards
from paraxis.runtime.model_watch import ModelWatch


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.offset = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), training=self.training) * self.factor + self.offset


def entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def test_guards_that_stay() -> None:
    """On what may change between calls, whatever this version of torch calls it; not on classes and modules."""
    shown: list[tuple[Any, bool]] = []
    graphs = []

    def guards(entries: Any) -> list[bool]:
        needed = needed_guards(entries, watch.watches)
        shown.extend(zip(entries, needed, strict=True))
        return needed

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model, x = nn.Sequential(Scaled(), Scaled()).eval(), torch.ones(2, 4)
    watch = ModelWatch(model, torch_modules=True)
    compiled = torch.compile(entry, backend=backend, options={"guard_filter_fn": guards}, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(model, x), model(x))
        of_classes = [needed for e, needed in shown if "type(model" in e.name]
        constant = [needed for e, needed in shown if e.guard_type == "MODULE_MATCH" and e.name.startswith("G[")]
        assert of_classes and not any(of_classes) and constant and not any(constant)
        assert any(needed for e, needed in shown if e.name.endswith(".training"))
        assert attributes_read([e for e, _ in shown]) >= {"eps", "normalized_shape"}
        compiled(model, x)
        assert len(graphs) == 1
        changes: list[Callable[[], Any]] = [
            lambda: setattr(model[0], "offset", 3.0),
            lambda: setattr(model[1], "factor", 4.0),  # of the object, where there was that of the class
            lambda: setattr(model[1], "forward", lambda x: x + 5),
        ]
        for i, change in enumerate(changes):
            change()
            assert torch.equal(compiled(model, x), model(x)), i
        compiled(model, torch.ones(3, 4))
        assert len(graphs) == 2 + len(changes)


@dataclass(frozen=True)
class Renamed:
    """A source of a class that another version of torch might have, with the name that a known one has."""

    base: Any
    member: str = "training"


def needed(entry: Any) -> list[bool]:
    return needed_guards([entry], lambda name, value: True)


def test_unknown_sources_stay() -> None:
    """What a guard is called does not matter: only what is recognized is dropped."""
    dropped = [
        AttrSource(TypeSource(LocalSource("model")), "forward"),
        AttrSource(GlobalSource("torch"), "nn"),
    ]
    for source in dropped:
        assert needed(_entry(source, "MODULE_MATCH")) == [torch.is_grad_enabled()]
        with torch.no_grad():
            assert needed(_entry(source, "MODULE_MATCH")) == [False]
            assert needed(_entry(Renamed(source), "MODULE_MATCH")) == [isinstance(source.base, GlobalSource)]
    with torch.no_grad():
        assert needed(_entry(Renamed(GlobalSource("torch")), "MODULE_MATCH")) == [True]
        assert needed_guards(
            [_entry(AttrSource(LocalSource("model"), "training"), "CONSTANT_MATCH")], lambda name, value: True
        ) == [True]
        assert needed(_entry(None, "MODULE_MATCH")) == [True], "a version that tells no sources"


def _entry(source: Any, guard_type: str) -> Any:
    """What ``guard_filter_fn`` is called with, under a name that says nothing."""
    guard = SimpleNamespace(originating_source=source, source=GuardSource.LOCAL)
    return SimpleNamespace(name="x", has_value=False, value=None, guard_type=guard_type, orig_guard=guard)
