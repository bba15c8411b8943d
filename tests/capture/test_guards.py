"""What is noticed of a model besides the compiler's guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paraxis.runtime.guards import Structure, needed_guards


def test_other_modules_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": nn.Linear(4, 4)}))
    structure = Structure(model)
    assert not structure.changed()
    nn.Sequential(nn.Linear(4, 4))  # modules elsewhere
    assert not structure.changed()
    model[0] = nn.Sequential(model[0])  # one around a layer
    assert structure.changed() and not structure.changed()
    model[1]["another"] = nn.Linear(4, 4)  # type: ignore[index,operator]
    assert structure.changed() and not structure.changed()


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.offset = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), training=self.training) * self.factor + self.offset


def entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def test_what_is_guarded_on() -> None:
    """What may change between calls is, whatever this version of torch calls it; classes and modules are not."""
    shown: dict[tuple[str, str], bool] = {}
    graphs = []

    def wanted(entries: Any) -> list[bool]:
        needed = needed_guards(entries)
        shown.update({(e.guard_type, e.name): kept for e, kept in zip(entries, needed, strict=True)})
        return needed

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model, x = nn.Sequential(Scaled(), Scaled()).eval(), torch.ones(2, 4)
    compiled = torch.compile(entry, backend=backend, options={"guard_filter_fn": wanted}, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(model, x), model(x))
        of_classes = [kept for (_, name), kept in shown.items() if "type(model" in name]
        constant = [kept for (kind, name), kept in shown.items() if kind == "MODULE_MATCH" and name.startswith("G[")]
        assert of_classes and not any(of_classes) and constant and not any(constant)
        assert any(kept for (_, name), kept in shown.items() if name.endswith(".training"))
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
