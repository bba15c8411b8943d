"""Passes leave markers, apply where they say, and form a pipeline that can be changed before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from paraxis import Config
from paraxis.passes import AnalyzeBase, PassBase, PassPipeline
from paraxis.passes.base import Rewrite
from paraxis.passes.setting import Setting
from paraxis.plan.offline import Planned


class Recorder(PassBase):
    """Appends its name to a list."""

    def __init__(self, name: str, log: list[str], applies: bool = True) -> None:
        self.name, self.log, self._applies = name, log, applies

    def applies(self, setting: Setting) -> bool:
        return self._applies

    def run(self, graph_module: GraphModule, ctx: Any, config: Config) -> GraphModule:
        self.log.append(self.name)
        return graph_module


class CountUsers(AnalyzeBase):
    """Marks every node with its number of users."""

    def run(self, graph_module: GraphModule, ctx: Any, config: Config) -> GraphModule:
        for node in graph_module.graph.nodes:
            self.place_marker_per_node(node, {"users": len(node.users)})
        return graph_module


def graph() -> GraphModule:
    return torch.fx.symbolic_trace(torch.nn.Linear(2, 2))


def recorders(*names: str) -> tuple[PassPipeline, list[str]]:
    log: list[str] = []
    return PassPipeline([Recorder(name, log) for name in names]), log


def test_pipeline_runs_the_passes_that_apply_in_order(offline: Planned) -> None:
    pipeline, log = recorders("a", "b", "c")
    pipeline.insert_after("a", Recorder("never", log, applies=False))
    seen: list[str] = []
    pipeline.run(graph(), offline.ctx, Config(), observer=lambda step, _: seen.append(step.title))
    assert log == seen == ["a", "b", "c"]
    seconds = offline.ctx.state.pass_seconds
    assert {"a", "b", "c"} <= set(seconds) and "never" not in seconds


def test_pipeline_runs_from_start_until_before_stop(offline: Planned) -> None:
    pipeline, log = recorders("a", "b", "c", "d")
    pipeline.run(graph(), offline.ctx, Config(), start="b", stop="d")
    assert log == ["b", "c"]
    pipeline.run(graph(), offline.ctx, Config(), stop="no such pass")
    assert log == ["b", "c", "a", "b", "c", "d"]


def test_pipeline_can_be_changed_by_name_and_by_class() -> None:
    pipeline, log = recorders("a", "b", "c")
    pipeline.insert_before("a", CountUsers())
    pipeline.insert_after(CountUsers, Recorder("x", log))
    pipeline.append(Recorder("last", log))
    pipeline.move_after("a", "c")
    assert pipeline.remove("b").title == "b"
    assert pipeline.names == ["CountUsers", "x", "c", "a", "last"]
    assert CountUsers in pipeline and "b" not in pipeline and len(pipeline) == 5
    with pytest.raises(ValueError, match=r"no pass 'b' in the pipeline; it has CountUsers, x, c, a, last"):
        pipeline.move_after("x", "b")
    assert pipeline.names == ["CountUsers", "x", "c", "a", "last"], "a failed move changes nothing"


def test_markers_are_read_by_field_and_cleaned(offline: Planned) -> None:
    captured = graph()
    CountUsers().run(captured, offline.ctx, Config())
    node = next(iter(captured.graph.nodes))
    assert CountUsers.already_executed_per_node(node)
    assert CountUsers.get_stored_field_info(node, "users") == len(node.users)
    with pytest.raises(KeyError, match="no field 'parents'"):
        CountUsers.get_stored_field_info(node, "parents", must_have=True)
    with pytest.raises(RuntimeError, match="already marked by CountUsers"):
        CountUsers().run(captured, offline.ctx, Config())
    CountUsers().clean_all(captured)
    assert CountUsers.get_stored_field_info(node, "users") is None
    with pytest.raises(RuntimeError, match="CountUsers"):
        CountUsers.get_stored_field_info(node, "users", must_have=True)


@pytest.mark.parametrize("clean", [True, False])
def test_calling_a_pipeline_cleans_markers_if_asked_to(offline: Planned, clean: bool) -> None:
    captured = graph()
    PassPipeline([CountUsers()])(captured, offline.ctx, Config(clean_markers_after_all_passes=clean))
    assert CountUsers.already_executed_per_node(next(iter(captured.graph.nodes))) is not clean


def test_pass_that_need_not_rerun_runs_for_the_first_compilation_only(offline: Planned) -> None:
    log: list[str] = []
    step = Recorder("once", log)
    step.need_rerun_when_recompile = False
    for offline.ctx.compile_times in (0, 1):
        step(graph(), offline.ctx, Config())
    offline.ctx.compile_times = 0
    assert log == ["once"]


def test_a_pass_that_changes_nothing_recompiles_nothing(offline: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, recompiled = graph(), list[Any]()
    monkeypatch.setattr(GraphModule, "recompile", lambda module: recompiled.append(module))
    CountUsers()(captured, offline.ctx, Config())
    assert not recompiled
    Recorder("a rewrite", [])(captured, offline.ctx, Config(lint_and_recompile=False))
    assert not recompiled
    Recorder("a rewrite", [])(captured, offline.ctx, Config())
    assert recompiled == [captured]


def test_rewrite_applies_in_its_setting_and_not_while_searching() -> None:
    step = Rewrite("name", "One line.", lambda module, setting: 1, lambda setting: setting.device == "cuda")
    assert step.title == "name" and step.summary == "One line."
    assert step.applies(Setting(device="cuda")) and not step.applies(Setting(device="cpu"))
    assert not step.applies(Setting(device="cuda", searching=True))
    assert Rewrite("name", "", lambda module, setting: 1, searching=True).applies(Setting(searching=True))


def test_rewrite_may_return_another_graph_module(offline: Planned) -> None:
    before, other = graph(), graph()
    assert Rewrite("same", "", lambda module, setting: 3)(before, offline.ctx, Config()) is before
    assert Rewrite("other", "", lambda module, setting: other)(before, offline.ctx, Config()) is other
