"""What somebody changes on one block of a deep model after the first call is honoured, whichever block it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.compare import max_difference, parallel_module
from torch import nn

BLOCKS, LAST = 6, 4
"""The programs of the first blocks run for all others: block 4 is one of these."""


class Scaled(nn.Module):
    """An MLP that keeps what it computes with in attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.factor, self.scales, self.weights = 1.0, {"adapter": 1.0, "inner": {"deep": 1.0}}, [1.0, 2.0]
        self.shift = torch.zeros(16)
        self.register_buffer("gain", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu()) * self.scales["adapter"] * self.scales["inner"]["deep"]  # type: ignore[index]
        return x + y * self.factor * self.weights[0] * self.gain + self.shift


class Deep(nn.Module):
    """Blocks that repeat, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Scaled() for _ in range(BLOCKS)), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Doubled(Scaled):
    """Another class of blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Tripled(nn.Linear):
    """Another class of layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input)


class Tables:
    """A base class without a forward."""

    gain = 1.0

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OfItsClass(Tables, Scaled):
    """Blocks that compute with what their classes have."""

    factors = [1.0]

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_class(self.mixed(super().forward(x))) * self.gain * self.factors[0]


CLASS_CHANGES: dict[str, Callable[[], Any]] = {
    "list": lambda: OfItsClass.factors.__setitem__(0, 2.0),
    "method of a base": lambda: setattr(Tables, "mixed", lambda self, x: x * 0.9),
    "class method": lambda: setattr(OfItsClass, "of_class", classmethod(lambda cls, x: x * 0.7)),
    "hides that of a base": lambda: setattr(OfItsClass, "gain", 0.5),
}


def change_class() -> dict[str, tuple[float, float]]:
    """(error, change of the results) after each of the changes of a class, which add up, in the default mode."""

    def deep() -> Deep:
        model = Deep()
        for block in model.blocks:
            block.__class__ = OfItsClass
        return model

    torch._dynamo.reset()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    model, unsharded, _ = parallel_module(deep, x)
    found = {}
    with torch.no_grad():
        before = unsharded(x)
        model(x)
        for name, apply in CLASS_CHANGES.items():
            apply()
            expected = unsharded(x)
            found[name] = (max_difference(model(x), expected), max_difference(expected, before))
            before = expected
    return found


def patched(block: Any, factor: float) -> None:
    block.forward = lambda x: type(block).forward(block, x) * factor


def patched_all(blocks: Any) -> None:
    for i, block in enumerate(blocks):  # the code is the same, what it captures is not
        patched(block, 1 + 0.1 * i)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m.blocks[LAST], "factor", 3.0),
    "dictionary": lambda m: m.blocks[LAST].scales.update(adapter=0.5),
    "inner dictionary": lambda m: m.blocks[LAST].scales["inner"].update(deep=0.25),
    "list": lambda m: m.blocks[LAST].weights.__setitem__(0, 4.0),
    "list of the first block": lambda m: m.blocks[0].weights.__setitem__(0, 2.0),
    "tensor in place": lambda m: m.blocks[LAST].shift.fill_(0.5),
    "tensor": lambda m: setattr(m.blocks[LAST], "shift", torch.full((16,), 0.7)),
    "buffer in place": lambda m: m.blocks[LAST].gain.fill_(2.0),
    "buffer": lambda m: setattr(m.blocks[LAST], "gain", torch.full((16,), 0.3)),
    "parameters dictionary": lambda m: m.blocks[LAST].up._parameters.update(weight=m.blocks[1].up.weight),
    "tied": lambda m: setattr(m.blocks[LAST].down, "weight", m.blocks[2].down.weight),
    "class": lambda m: setattr(m.blocks[LAST], "__class__", Doubled),
    "class of a layer": lambda m: setattr(m.blocks[LAST].up, "__class__", Tripled),
    "class of the first layer": lambda m: setattr(m.blocks[0].up, "__class__", Tripled),
    "another order": lambda m: setattr(m, "blocks", nn.ModuleList([*m.blocks][::-1])),
    "one fewer": lambda m: m.blocks.__delitem__(LAST),
    "patched": lambda m: patched(m.blocks[1], 0.5),
    "all patched": lambda m: patched_all(m.blocks),
}


SEEN_ALIKE = {"inner dictionary", "list of the first block", "buffer in place", "class of the first layer", "patched"}
"""Changes that are noticed as others of the list are: with Inductor, each of them compiles for seconds."""


def change(compile: str | None, names: list[str]) -> dict[str, tuple[float, float]]:
    """(error, change of the results) after each of these changes, which add up."""
    torch._dynamo.reset()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    model, unsharded, _ = parallel_module(Deep, x, compile=compile)
    found = {}
    with torch.no_grad():
        before = unsharded(x)
        model(x), model(x[:1])
        for name in names:
            for each in (model, unsharded):
                CHANGES[name](each)
            expected = unsharded(x)
            found[name] = (max_difference(model(x), expected), max_difference(expected, before))
            before = expected
    return found


@pytest.mark.parametrize(
    ("compile", "names"),
    [
        pytest.param(None, list(CHANGES), id="None"),
        pytest.param("inductor", [name for name in CHANGES if name not in SEEN_ALIKE], id="inductor"),
        pytest.param("inductor", list(CHANGES), id="inductor, all", marks=pytest.mark.long),
    ],
)
def test_changes_of_one_block_are_honoured(ranks: Any, compile: str | None, names: list[str]) -> None:
    for found in ranks(2).run(change, compile, names, timeout=600):
        assert list(found) == names and all(effect > 1e-4 for _, effect in found.values()), found
        assert not {name: error for name, (error, _) in found.items() if not error < 1e-4}


def test_changes_of_a_class_are_honoured(ranks: Any) -> None:
    for found in ranks(2).run(change_class, timeout=600):
        assert list(found) == list(CLASS_CHANGES) and all(effect > 1e-4 for _, effect in found.values()), found
        assert not {name: error for name, (error, _) in found.items() if not error < 1e-4}
