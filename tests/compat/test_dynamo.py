"""What Dynamo's sources tell about guards, and its other private names."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._dynamo.source import (
    AttrSource,
    CellContentsSource,
    ClosureSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    LocalSource,
    SubclassAttrListSource,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
    UnspecializedNNModuleSource,
)
from torch.fx import Graph, GraphModule

from paraxis.compat import dynamo as compat

model = LocalSource("model")


def test_every_name_exists() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_inside_of_a_tensor_subclass() -> None:
    weight = AttrSource(model, "weight")
    assert compat.subclass_owner(AttrSource(weight, "_inner"), "_inner") == weight
    assert compat.subclass_owner(SubclassAttrListSource(weight), "_inner") == weight
    assert compat.subclass_owner(GetItemSource(SubclassAttrListSource(weight), 0), "_inner") == weight
    assert compat.subclass_owner(AttrSource(weight, "other"), "_inner") is None
    assert compat.subclass_owner(weight, "_inner") is None and compat.subclass_owner(None, "_inner") is None


def test_attributes_of_classes() -> None:
    of_class = AttrSource(TypeSource(AttrSource(model, "layer")), "forward")
    assert compat.is_class_attribute_of_local(of_class)
    assert not compat.is_class_attribute_of_local(AttrSource(model, "layer"))
    assert not compat.is_class_attribute_of_local(AttrSource(TypeSource(GlobalSource("torch")), "nn"))
    assert compat.class_attribute_of_module(of_class) is None, "nobody knows that it is a module's"
    of_module = TypeSource(UnspecializedNNModuleSource(model))
    members = TypeDictSource(GetItemSource(TypeMROSource(of_module), 1))
    assert compat.class_attribute_of_module(AttrSource(of_module, "scale")) == ("scale", False)
    assert compat.class_attribute_of_module(DictGetItemSource(members, "scale")) == ("scale", False)
    assert compat.class_attribute_of_module(GetItemSource(DictGetItemSource(members, "sizes"), 0)) == ("sizes", True)
    assert (
        compat.class_attribute_of_module(members) == ("", True) and compat.class_attribute_of_module(of_module) is None
    )
    inside = CellContentsSource(GetItemSource(ClosureSource(AttrSource(of_module, "forward")), 0), "cell_contents")
    assert compat.class_attribute_of_module(inside) is None
    assert compat.is_training_flag(AttrSource(model, "training"))
    assert not compat.is_training_flag(DictGetItemSource(model, "training"))


def test_attributes_of_global_modules() -> None:
    source = AttrSource(GlobalSource("alias"), "_is_fastpath_enabled")
    name, mha = "_is_fastpath_enabled", torch.backends.mha
    assert compat.attribute_of_global(source, mha, name, {"alias": mha})
    assert not compat.attribute_of_global(source, mha, name, {"alias": torch})
    assert not compat.attribute_of_global(source, mha, name, {})
    assert not compat.attribute_of_global(source, mha, "other", {"alias": mha})
    assert not compat.attribute_of_global(AttrSource(model, name), mha, name, {"model": mha})


class Small(nn.Module):
    factor = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.layer(x)) * (self.factor if self.training else 1)


def test_guards_of_a_compilation() -> None:
    """The questions have an answer on this version of torch: each is true for some guard."""
    seen: list[Any] = []

    def guards(entries: Any) -> list[bool]:
        seen.extend(entries)
        return [True] * len(entries)

    compiled = torch.compile(lambda model, x: model(x), backend="eager", options={"guard_filter_fn": guards})
    compiled(Small(), torch.ones(1, 2))
    sources = [compat.source_of(e) for e in seen]
    assert all(source is not None for source in sources)
    for question in (compat.is_class_attribute_of_local, compat.is_training_flag):
        assert any(map(question, sources)), question
    for question in (compat.guards_torch_module, compat.guards_global_constant):
        assert any(map(question, seen)), question
    assert not any(map(compat.guards_subclass_metadata, seen))
    assert compat.source_of(object()) is None


class Cache:
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class OtherCache(Cache):
    pass


class MakesCache(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cache().update(x)


def test_methods_of_objects_that_a_forward_makes() -> None:
    seen: list[set[tuple[type, str]]] = []

    def backend(graph: GraphModule, _: Any) -> Any:
        seen.append(compat.traced_methods())
        return graph

    torch.compile(MakesCache(), backend=backend)(torch.ones(2))
    assert seen[0] >= {(Cache, "update"), (OtherCache, "update")}
    assert not any(issubclass(cls, MakesCache) or cls.__module__.startswith("torch") for cls, _ in seen[0])


_logger = logging.getLogger("model")


def test_ignored_logging(caplog: Any) -> None:
    """Calls are dropped; no version of torch complains about the functions in its configuration."""

    def function(x: torch.Tensor) -> torch.Tensor:
        _logger.critical("while tracing")
        return x + 1

    compat.ignore_logging([logging.Logger.critical, logging.Logger.exception])
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_recompile_limit_is_only_raised() -> None:
    before = torch._dynamo.config.recompile_limit
    try:
        compat.raise_recompile_limit(before + 5)
        compat.raise_recompile_limit(1)
        assert torch._dynamo.config.recompile_limit == before + 5
    finally:
        torch._dynamo.config.recompile_limit = before


def test_dynamic_and_specialized_sizes() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    for mark, expected in ((lambda x: compat.mark_maybe_dynamic(x, 0), 1), (compat.specialize, 2)):
        graphs.clear()
        compiled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)
        for length in (4, 5):
            x = torch.ones(length, 3)
            mark(x)
            compiled(x)
        assert len(graphs) == expected
        torch._dynamo.reset()


def test_names_of_placeholders() -> None:
    """As Dynamo of this version of torch names them."""
    names: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.find_nodes(op="placeholder"))
        return graph

    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    torch.compile(lambda model, x: model(x), backend=backend, fullgraph=True)(module, torch.ones(1, 2))
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} == {compat.parameter_of(name) for name in names} - {None}
    assert {"1.running_mean", "1.running_var"} == {compat.buffer_of(name) for name in names} - {None}


def test_names_of_inputs() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output((a, b))
    module = GraphModule({}, graph)
    compat.name_inputs(module, {1})
    assert "tensor_dict" not in a.meta and b.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}
    assert a._dynamo_source != b._dynamo_source  # type: ignore[attr-defined]


class _Slots:
    """An object that a forward writes attributes of, as a KV cache."""


def test_attributes_that_are_set_after_a_higher_order_operator_are_not_lost() -> None:
    compat.follow_side_effects()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        slots = _Slots()
        slots.before = x + 1
        y = torch.cond(x.sum() > 0, double, double, (x,))
        slots.after = y
        return slots.after + slots.before

    x = torch.ones(3)
    assert torch.equal(torch.compile(forward, fullgraph=True, backend="eager")(x), 2 * x + x + 1)


@pytest.fixture
def sizes_stay_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adaptation in every trace; it may be there already, for traces of a parallel model."""
    translator = torch._dynamo.symbolic_convert.InstructionTranslatorBase
    before = getattr(translator.BUILD_STRING, "_before", translator.BUILD_STRING)
    for cls in (translator, *compat._subclasses(translator)):
        monkeypatch.setattr(cls, "BUILD_STRING", before)
        monkeypatch.setattr(cls, "dispatch_table", list(cls.dispatch_table))
    compat.keep_sizes_in_text(lambda: True)
    torch._dynamo.reset()


@pytest.mark.usefixtures("sizes_stay_in_text")
def test_a_size_in_a_message_is_not_specialized_on() -> None:
    def check(condition: Any, message: str) -> None:
        torch._check(condition)

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        check(x.shape[0] == y.shape[0], f"got {x.shape[0]}")
        check(x.shape[0] == y.shape[0], f"{y.shape[0]} and {x.sum()}, {3}")
        return x + y

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (3, 4, 5, 6):
        assert torch.equal(compiled(torch.ones(n), torch.ones(n)), torch.full((n,), 2.0))
    assert counter.frame_count == 2


@pytest.mark.usefixtures("sizes_stay_in_text")
def test_a_size_in_a_string_that_is_read_has_its_value() -> None:
    table = {"size 4": 1.0, "size 5": 2.0}
    compiled = torch.compile(lambda x: x * table[f"size {x.shape[0]}"], fullgraph=True, backend="eager")
    for n, factor in ((4, 1.0), (5, 2.0), (4, 1.0)):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), factor))


@pytest.mark.parametrize("logged", [False, True])
def test_what_only_logs_show_is_not_computed(monkeypatch: pytest.MonkeyPatch, logged: bool) -> None:
    from torch._dynamo import guards, output_graph, side_effects, symbolic_convert

    calls: list[str] = []
    for owner, name in (
        (guards, "profile_guard_manager"),
        (symbolic_convert, "get_funcname"),
        (side_effects.SideEffects, "_format_side_effect_message"),
    ):
        if (function := getattr(owner, name, None)) is not None:  # torch 2.11 does not format side effects
            own = getattr(function, "_before", function)
            monkeypatch.setattr(owner, name, lambda *args, own=own, name=name: calls.append(name) or own(*args))
    compat.skip_diagnostics(lambda: True)
    for log in (guards.guards_log, output_graph.trace_call_log, getattr(side_effects, "side_effects_log", None)):
        if log is not None:
            monkeypatch.setattr(log, "isEnabledFor", lambda level: logged)
    monkeypatch.setattr(compat.trace_log, "handlers", [])
    torch._dynamo.reset()

    class Counter:
        count = 0

    def forward(counter: Any, x: torch.Tensor) -> torch.Tensor:
        counter.count += 1
        return x.sin() + 1

    counter = Counter()
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(counter, torch.zeros(2)), torch.ones(2)) and counter.count == 1
    assert ("profile_guard_manager" in calls) == ("get_funcname" in calls) == logged
    assert logged or not calls
