"""Parameters that a checkpoint stores in another form: one tensor per expert, packed, split or transposed.

transformers has a recipe for each conversion, which is used here too. This module finds out from the headers alone
which parameters a recipe produces and whether they fit, and reads only the tensors that a rank's shard needs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .names import CheckpointNames
from .partial_recipes import Fill, Index, TracedRecipe

Read = Callable[[str], torch.Tensor]


@dataclass(eq=False)
class Conversion:
    """Tensors of the checkpoint that become one or several parameters.

    Attributes:
        first: The first parameter that it produces.
        converter: transformers' recipe.
        model: The model it is for.
        locate: From names in the recipe's results to names of parameters.
        sources: The keys of the checkpoint, by the recipe's patterns, in order.
        targets: The parameters and the shapes they get, or nothing if the recipe fails on these tensors.
        error: Why it fails.
        traced: The traced recipe, which computes parts of its results.
    """

    first: str
    converter: Any
    model: nn.Module
    locate: Callable[[str], str | None]
    sources: dict[str, list[str]] = field(default_factory=dict)
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    error: str = ""
    traced: TracedRecipe | None = None

    @property
    def keys(self) -> list[str]:
        """All keys of the checkpoint that are read for it."""
        return [key for several in self.sources.values() for key in several]

    def plain(self, quantized: Container[str]) -> bool:
        """Whether its parameters are not quantized."""
        return not any(name in quantized for name in self.targets)

    def run(self, read: Read) -> dict[str, torch.Tensor]:
        """The full parameters, from the tensors that ``read`` returns for keys of the checkpoint."""
        converter = deepcopy(self.converter)
        for pattern, keys in self.sources.items():
            for key in keys:
                converter.add_tensor(self.first, key, pattern, lambda key=key: read(key))
        results = converter.convert(self.first, model=self.model, config=getattr(self.model, "config", None))
        values = {name: value[0] if isinstance(value, list) else value for name, value in results.items()}
        return {located: value for name, value in values.items() if (located := self.locate(name)) is not None}

    def fill(self, out: torch.Tensor, name: str, index: Index, fill: Fill) -> None:
        """Write the part ``index`` of a parameter into ``out``; ``fill`` reads the parts of stored tensors it needs."""
        assert self.traced is not None, self.error
        self.traced.fill(out, name, index, fill)

    def problems(self, params: Mapping[str, torch.Tensor]) -> list[str]:
        """A line for each parameter whose shape does not match."""
        stored = f"stored in another form, as {len(self.keys)} tensors such as {self.keys[0]!r}"
        if self.error:
            return [f"{self.first}: {stored}, which transformers cannot convert ({self.error})"]
        return [
            f"{name}: {stored}; converted it has shape {shape}, in the model {tuple(params[name].shape)}"
            for name, shape in self.targets.items()
            if name in params and tuple(params[name].shape) != shape
        ]


def find_conversions(
    params: Mapping[str, torch.Tensor],
    tied_names: Mapping[str, Sequence[str]],
    shapes: Callable[[str], torch.Tensor],
    weight_map: Mapping[str, str],
    base_model_prefix: str = "",
    model: nn.Module | None = None,
) -> list[Conversion]:
    """The conversions that this checkpoint needs for these parameters.

    Args:
        params: Parameters by their first names.
        tied_names: All names of those that have several, by first name.
        shapes: From a key of the checkpoint to a meta tensor of its shape and dtype.
        weight_map: The keys of the checkpoint, with their files.
        base_model_prefix: Name of the model inside the model with a head; keys may have it or lack it.
        model: A transformers model, whose conversions apply.
    """
    first_name = {other: first for first, several in tied_names.items() for other in several}
    names = CheckpointNames({*params, *first_name}, base_model_prefix, model)
    if not names.converters:
        return []
    assert model is not None

    def locate(name: str) -> str | None:
        located = names.locate(name)
        return first_name.get(located, located) if located is not None else None

    found: dict[str, Conversion] = {}
    for key in sorted(weight_map, key=_natural):
        match = names.converted(key)
        if match is None:
            continue
        name, converter, pattern = match
        conversion = found.setdefault(name, Conversion(name, converter, model, locate))
        conversion.sources.setdefault(pattern, []).append(key)
    for conversion in found.values():
        try:
            conversion.traced = TracedRecipe(conversion.run, {key: shapes(key) for key in conversion.keys})
            conversion.targets = conversion.traced.shapes
        except Exception as error:
            conversion.error = f"{type(error).__name__}: {error}"
            conversion.targets = {conversion.first: ()}
    return list(found.values())


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sorts expert 2 before expert 10: the order in which a recipe stacks them."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
