"""What is noticed of a model that changes after it was compiled, and what it costs to look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.compare import batch, max_difference, parallel, reference
from torch import nn
from transformers.cache_utils import DynamicLayer

from paraxis.runtime.model_watch import ModelWatch


def changed(watch: ModelWatch) -> tuple[bool, bool]:
    """(whether something may have changed, whether programs are stale); the next look finds nothing new."""
    result = watch.changed(), watch.look()
    assert not watch.changed() and not watch.look()
    return result


def test_replaced_modules_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": nn.Linear(4, 4, bias=False)}))
    watch = ModelWatch(model, torch_modules=True)
    assert not watch.changed()
    nn.Sequential(nn.Linear(4, 4))  # modules elsewhere
    assert not changed(watch)[1]
    model[0] = nn.Sequential(model[0])  # one around a layer
    assert changed(watch) == (True, True)
    model[1]["another"] = nn.Linear(4, 4)  # type: ignore[index,operator]
    assert changed(watch) == (True, True)
    model[1]["inner"].bias = nn.Parameter(torch.zeros(4))  # type: ignore[index]
    assert changed(watch) == (True, True)


def test_hooks_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watch = ModelWatch(model, torch_modules=False)
    plain = watch.hooks()
    model.register_forward_hook(print)
    assert changed(watch) == (True, False) and watch.hooks() == plain, "hooks of the module itself run around it"
    handles = [model[0].register_forward_hook(lambda m, a, o: o * 2), model[1].register_full_backward_hook(print)]
    assert changed(watch) == (True, False)
    assert len(watch.graph_hooks) == 1 and watch.python_hooks == ["1"]
    for handle in handles:
        handle.remove()
        assert changed(watch) == (True, False)
    assert watch.hooks() == plain
    model[0].register_forward_hook(lambda m, a, o: o * 2)
    assert changed(watch)[0] and watch.leave_graph() and watch.python_hooks == ["0"]
    model[0]._forward_hooks = type(model[0]._forward_hooks)()  # how some remove all of them
    assert changed(watch)[0] and watch.hooks() == plain


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.norm(self.layer(x)))


def test_classes_and_attributes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Scaled(), Scaled())
    watch = ModelWatch(model, torch_modules=True)
    watch.read_attributes({"eps"})
    changes: list[Callable[[], Any]] = [
        lambda: monkeypatch.setattr(Scaled, "forward", lambda self, x: x),
        lambda: monkeypatch.setattr(Scaled, "helper", lambda self, x: x),
        lambda: monkeypatch.setattr(Scaled, "factor", 3.0),
        lambda: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x),
        lambda: setattr(model[0].layer, "forward", lambda x: x),
        lambda: setattr(model[1].norm, "eps", 1.0),
    ]
    for i, change in enumerate(changes):
        change()
        assert changed(watch) == (True, True), i
    monkeypatch.undo()
    assert changed(watch) == (True, True)


class Layer:
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class OtherLayer(Layer):
    pass


def test_methods_of_other_classes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a class below gets one of its own, and where it is taken away again."""
    watch = ModelWatch(nn.Sequential(Scaled()), torch_modules=False)
    watch.read_methods({(Layer, "update"), (OtherLayer, "update"), (Layer, "absent")})
    assert not watch.changed()
    for cls, name in ((Layer, "update"), (OtherLayer, "update"), (Layer, "absent")):
        with monkeypatch.context() as patched:
            patched.setattr(cls, name, lambda self, x: x, raising=False)
            assert changed(watch) == (True, True), (cls, name)
        assert changed(watch) == (True, True), (cls, name)


def double(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives twice as much."""
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def patch(model: Any, what: str) -> Callable[[], Any]:
    """Change a submodule or its class; returns what undoes it."""
    layer = model.model.layers[0]
    if what == "forward of a linear":
        layer.mlp.down_proj.forward = double(layer.mlp.down_proj.forward)
        return lambda: delattr(layer.mlp.down_proj, "forward")
    if what == "attribute":
        layer.self_attn.scaling *= 2
        return lambda: setattr(layer.self_attn, "scaling", layer.self_attn.scaling / 2)
    owner, name = {
        "class": (type(layer.mlp), "forward"),
        "class of caches": (DynamicLayer, "update"),  # which the model makes in its forward
        "function of torch": (F, "silu"),
    }[what]
    own = getattr(owner, name)
    if own.__name__ == "<lambda>":  # the other model has patched it
        return lambda: None

    def more_values(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, keys, values * 2, *args, **kwargs)

    more_values.__name__ = "<lambda>"
    setattr(owner, name, more_values if name == "update" else double(own))
    return lambda: setattr(owner, name, own)


def patch_and_undo(folder: str, compile: Any, changes: list[str]) -> list[tuple[float, float]]:
    """(error of the parallel model, change of the logits) with each change and without it again."""
    (model, _), unsharded = parallel(folder, compile=compile), reference(folder)
    ids, _ = batch(256)
    found = []
    with torch.no_grad():
        model(input_ids=ids)
        plain = unsharded(input_ids=ids).logits
        for what in changes:
            undo = [patch(one, what) for one in (model, unsharded)]
            for step in range(2):
                expected = unsharded(input_ids=ids).logits
                error = max_difference(model(input_ids=ids).logits, expected)
                found.append((error, max_difference(expected, plain)))
                if step == 0:
                    for one in undo:
                        one()
    return found


@pytest.mark.parametrize(
    ("compile", "changes"),
    [
        (None, ["forward of a linear", "attribute", "class", "function of torch"]),
        ("inductor", ["forward of a linear", "attribute", "class", "class of caches"]),
        pytest.param("auto", ["class of caches", "function of torch", "class"], marks=pytest.mark.long),
        pytest.param("inductor", ["function of torch"], marks=pytest.mark.long),
    ],
)
def test_patched_modules_and_classes_are_honoured(
    ranks: Any, checkpoints: Any, compile: Any, changes: list[str]
) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for found in ranks(2).run(patch_and_undo, folder, compile, changes, timeout=600):
        assert max(error for error, _ in found) < 1e-4
        assert all((change > 1e-3) == (i % 2 == 0) for i, (_, change) in enumerate(found))
