"""What is noticed of a model besides the compiler's guards."""

from __future__ import annotations

from torch import nn

from paraxis.capture.guards import Structure


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
