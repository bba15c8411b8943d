"""What a quantized checkpoint format is: how one weight is packed, which keys belong together, and in which units.

A format knows one stored weight ``[..., out, in]``: the tensors of the checkpoint that it is stored as, and how the
parts that kernels take (:class:`~paraxis.kernels.quantized.Parts`) are read from slices of these and written back. What
is above it (experts that are stored one by one, shards, files, ranks) is the same for all formats.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from ...placement import Ranges
from .activations import InputQuantization

Index = tuple[Ranges, ...]
"""Per dimension, the ranges of a box."""
Read = Callable[[str, Index | None], torch.Tensor]
"""From the name of a stored tensor and a box to its values; the full tensor for None."""

STACK, ROWS, COLUMNS, CONSTANT = "stack", "rows", "columns", "constant"
"""What a dimension of a part follows: the weights of a stack, their rows or columns, or nothing."""


class Dim(NamedTuple):
    """A dimension of a part: what it follows, and how many indices of that it has in one."""

    follows: str
    block: int = 1
    size: int = 1
    """Of a constant dimension."""


class PartForm(NamedTuple):
    """A part of a weight, whatever its size; the dimensions of a stack come in front of these."""

    dtype: torch.dtype
    rows: Dim
    columns: Dim


@dataclass(frozen=True)
class Tensor:
    """A tensor that a format stores: its shape, the dtypes it may have, and whether it may be missing."""

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


class Format(ABC):
    """One way to store a quantized weight. A subclass is a format; its attributes are the options of a checkpoint."""

    name: ClassVar[str]
    """For people."""
    marker: ClassVar[str]
    """The suffix of the key by which a quantized weight is recognized."""
    weight: ClassVar[str] = ".weight"
    """What stands in the name of the parameter instead of the suffix."""
    transposed: ClassVar[bool] = False
    """Whether parameters have the last two dimensions of what is stored exchanged: ``[in, out]``."""
    stacks: ClassVar[bool] = True
    """Whether stacks of weights (experts) are quantized too."""
    linears: ClassVar[bool] = True
    """Whether linear layers are quantized: not in formats of experts alone."""
    from_plain: ClassVar[bool] = False
    """Whether ``quantization_config=`` may quantize plain checkpoints to it."""
    zero_scales: ClassVar[bool] = False
    """Whether a scale may be zero, of a block of zeros."""
    inputs: InputQuantization | None = None
    """How inputs of linear layers are quantized, if they are."""
    direct: ClassVar[Mapping[str, str]] = {}
    """Parts that are stored as they are: the suffix of their tensor."""

    def plain_problem(self, data: Mapping[str, Any]) -> str | None:
        """Why this configuration cannot be applied to a plain checkpoint while it is loaded; None if it can."""
        return None

    @abstractmethod
    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """What the parts of a weight mean."""

    def rounding(self, found: Mapping[str, torch.Tensor]) -> str:
        """The dtype that products with the scale are rounded to, from the tensors as they are in the checkpoint."""
        return ""

    @abstractmethod
    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """The parts of a weight, from (meta) tensors by suffix as they are in the checkpoint."""

    @abstractmethod
    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The tensors that are stored for a weight of this shape, by suffix."""

    @abstractmethod
    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """The shape of the weight, from the tensors that are stored."""

    def refined(self, found: Mapping[str, torch.Tensor], read: Read) -> Format:
        """The format of one weight, where small tensors of the checkpoint say more than the configuration.

        Raises:
            CheckpointError: with what is wrong with their values.
        """
        return self

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """A box of a part, from slices of what is stored. ``index`` counts in the units of the part."""
        return read(self.direct[part], index)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The stored tensors of a weight, by suffix, from its parts: the inverse of :meth:`load`, bit by bit.

        ``constants``: the small tensors that are written back as they were.
        """
        return {suffix: parts[part] for part, suffix in self.direct.items() if part in parts}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that are stored for a weight, by suffix."""
        raise CheckpointError(f"weights cannot be quantized to {self.name} while they are loaded")

    def constants(self) -> tuple[str, ...]:
        """Small tensors that are written back as they were, and no part has."""
        return ()

    def new_constants(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Constants of a weight that is quantized while it is loaded, by suffix."""
        return {}

    def units(self) -> tuple[int, int]:
        """The rows and columns of a box that can be quantized alone."""
        rows, columns = self.encoding((1 << 30, 1 << 30)).block
        return rows, columns


@dataclass(eq=False)
class Rule:
    """Which modules a format is for: patterns of names or of classes, as a configuration has them."""

    format: Format
    targets: Sequence[str] = ()
    """Names, patterns after ``re:``, or names of classes; empty for all."""


@dataclass(eq=False)
class Quantization:
    """What a configuration says: the formats, what they are for, and what is not quantized.

    Attributes:
        method: ``quant_method``.
        rules: The formats and the modules they are for, of which the first that matches counts.
        ignored: Names and patterns of modules that are not quantized; None for the method's default: the output layer.
        loose: Whether a name also stands for the modules inside of it, or is a part of a name.
        data: The configuration.
        keeps_ends: Whether the input and the output layer are not quantized, besides those that are ignored.
    """

    method: str
    rules: Sequence[Rule]
    ignored: Sequence[str] | None = None
    loose: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)
    keeps_ends: bool = False

    def format_of(self, module: str, kind: str = "Linear") -> Format | None:
        """The format of the weight of a module, by its name and class; None if it is not quantized."""
        if any(self._names(pattern, module, kind) for pattern in self.ignored or ()):
            return None
        for rule in self.rules:
            if not rule.targets or any(self._names(target, module, kind) for target in rule.targets):
                return rule.format
        return None

    def _names(self, pattern: str, module: str, kind: str) -> bool:
        if pattern.startswith("re:"):
            return _compiled(pattern[3:], f"{pattern!r} is no pattern").match(module) is not None
        if not self.loose:
            return pattern in (module, kind)
        if f".{pattern}." in f".{module}." or fnmatchcase(module, pattern):
            return True
        if pattern.startswith("*"):  # no regular expression
            return False
        inside = _compiled(rf"(?:{pattern})(?=\.|$)", f"{pattern!r} is no name or pattern of modules")
        return inside.match(module) is not None

    @property
    def formats(self) -> list[Format]:
        """All formats."""
        return [rule.format for rule in self.rules]


def _compiled(pattern: str, problem: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"quantization_config: {problem}: {error}") from error


def covering(ranges: Ranges, unit: int, size: int) -> tuple[Ranges, torch.Tensor]:
    """Ranges in units of ``unit`` that cover these ranges, and which of their indices are those of the ranges."""
    outer: list[tuple[int, int]] = []
    for start, stop in ranges:
        a, b = start // unit, -(-stop // unit)
        if outer and a <= outer[-1][1]:
            outer[-1] = (outer[-1][0], max(b, outer[-1][1]))
        else:
            outer.append((a, b))
    inside = torch.cat([torch.arange(a * unit, b * unit) for a, b in outer]) if outer else torch.empty(0)
    chosen = torch.zeros(len(inside), dtype=torch.bool)
    for start, stop in ranges:
        chosen |= (inside >= start) & (inside < min(stop, size))
    return tuple(outer), chosen.nonzero().flatten()


def elements(ranges: Ranges, unit: int, size: int) -> Ranges:
    """Ranges of blocks as ranges of indices."""
    return tuple((a * unit, min(b * unit, size)) for a, b in ranges)


def scalar_problem(name: str, value: torch.Tensor) -> str:
    """What is wrong with a number that values are multiplied or divided by; empty if nothing is."""
    found = value.to(torch.float32)
    if found.numel() != 1:
        return f"{name} has shape {tuple(found.shape)}, and is not one number"
    if not bool(torch.isfinite(found).all()):
        return f"{name} has NaN or infinity"
    if bool((found == 0).any()):
        return f"{name} is zero"
    return ""


def reduced_precision(scales: torch.Tensor) -> str:
    """The name of the dtype of scales in which a format multiplies; empty for float32."""
    return str(scales.dtype).removeprefix("torch.") if scales.dtype in (torch.bfloat16, torch.float16) else ""
