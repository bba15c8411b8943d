"""bitsandbytes: NF4 and FP4 in blocks of the flattened weight, and int8 with a scale per row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from ...placement import Ranges
from .activations import InputQuantization
from .bits import pack_pairs
from .format import COLUMNS, CONSTANT, ROWS, Dim, Format, Index, PartForm, Quantization, Read, Rule, Tensor

NF4 = (
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
    + (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
    + (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    + (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
)
"""The quantiles of a normal distribution that NF4 has."""
FLAT_BLOCK = 64


@dataclass(frozen=True)
class FlatBlocks(Format):
    """``weight``: bytes of two codes, the first in the high bits, of the flattened weight; ``absmax`` per block of it.

    A block may begin in one row and end in the next. Per row, such a weight has equal runs of columns that are in one
    block each, and every run has the scale of its block.

    Attributes:
        kind: ``nf4`` or ``fp4``.
        block: The numbers that have one scale.
        table: The numbers that codes stand for, as the checkpoint has them.
        nested: The block of scales that are quantized themselves; 0 if they are not.
        offset: What is added to scales that are quantized.
        dtype: The dtype that values are rounded to.
    """

    kind: str = "nf4"
    block: int = FLAT_BLOCK
    table: tuple[float, ...] = NF4
    nested: int = 0
    offset: float = 0.0
    dtype: str = ""

    name: ClassVar[str] = "bitsandbytes 4-bit"
    stacks: ClassVar[bool] = False
    from_plain: ClassVar[bool] = True
    zero_scales: ClassVar[bool] = True

    def plain_problem(self, data: Mapping[str, Any]) -> str | None:
        """Scales that are quantized themselves have an offset that is the mean of all of a weight's scales."""
        if not data.get("bnb_4bit_use_double_quant"):
            return None
        return "bnb_4bit_use_double_quant=True needs the scales of all ranks: leave it out"

    @property
    def marker(self) -> str:  # type: ignore[override]
        """The key of the state."""
        return f".weight.quant_state.bitsandbytes__{self.kind}"

    def run(self, shape: tuple[int, ...]) -> int:
        """How many columns are always in one block."""
        return gcd(shape[-1], self.block)

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Runs of columns."""
        return Encoding(block=(1, self.run(shape)), table=self.table)

    def rounding(self, found: Mapping[str, torch.Tensor]) -> str:
        """The dtype that the weight had."""
        return self.dtype if self.dtype in ("bfloat16", "float16") else ""

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Codes in pairs, and scales, which are not quantized in memory."""
        return {
            "codes": PartForm(torch.uint8, Dim(ROWS), Dim(COLUMNS, 2)),
            "scales": PartForm(torch.float32, Dim(ROWS), Dim(COLUMNS, self.run(shape))),
        }

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Bytes, scales, and what both mean."""
        rows, columns = shape
        blocks = -(-rows * columns // self.block)
        floats, byte = (torch.float32,), (torch.uint8,)
        found = {
            ".weight": Tensor((-(-rows * columns // 2), 1), byte),
            ".weight.absmax": Tensor((blocks,), byte if self.nested else floats),
            ".weight.quant_map": Tensor((16,), floats),
            self.marker: Tensor(None, byte),
        }
        if self.nested or shape == (1, 1):
            found[".weight.nested_absmax"] = Tensor((-(-blocks // max(self.nested, 1)),), floats)
            found[".weight.nested_quant_map"] = Tensor((256,), floats)
        return found

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """As the state says."""
        shape = tuple(self._state(found, read)["shape"])
        if len(shape) != 2 or shape[-1] % 2:
            raise ValueError(f"a weight of shape {shape} cannot be split into rows of bytes")
        return shape

    def _state(self, found: Mapping[str, torch.Tensor], read: Read) -> dict[str, Any]:
        if self.marker not in found:
            raise KeyError(self.marker)
        try:
            state = json.loads(bytes(read(self.marker, None).tolist()).decode())
            return {"shape": state["shape"], "blocksize": state["blocksize"], **state}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.marker.lstrip('.')} cannot be read: {type(error).__name__}: {error}") from None

    def refined(self, found: Mapping[str, torch.Tensor], read: Read) -> Format:
        """Blocks and numbers are those of the state."""
        state = self._state(found, read)
        if ".weight.quant_map" not in found:
            raise KeyError(".weight.quant_map")
        table = tuple(float(x) for x in read(".weight.quant_map", None))
        nested = int(state["nested_blocksize"]) if "nested_offset" in state else 0
        dtype, offset = str(state.get("dtype", "")), float(state.get("nested_offset", 0.0))
        return replace(self, block=int(state["blocksize"]), table=table, nested=nested, offset=offset, dtype=dtype)

    def units(self) -> tuple[int, int]:
        """Blocks do not begin with rows: all of a weight is quantized."""
        return (1 << 30, 1 << 30)

    def constants(self) -> tuple[str, ...]:
        """What codes and scales mean."""
        nested = (".weight.nested_absmax", ".weight.nested_quant_map") if self.nested else ()
        return (".weight.quant_map", self.marker, *nested)

    def new_constants(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The numbers, and the state."""
        state = {"quant_type": self.kind, "blocksize": self.block, "shape": list(shape)}
        state["dtype"] = str(dtype).removeprefix("torch.")
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {".weight.quant_map": torch.tensor(self.table), self.marker: text}

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes and blocks of a box, which are not next to one another in the file if it has not all columns."""
        rows, columns = _indices(index[0]), index[1]
        if part == "codes":
            width = shape[-1] // 2
            found = read(".weight", (_flat(index[0], columns, width), ((0, 1),))).reshape(len(rows), -1)
            return (found << 4) | (found >> 4)
        run = self.run(shape)
        blocks = (rows.unsqueeze(1) * shape[-1] + _indices(columns) * run) // self.block
        needed, where = torch.unique(blocks, return_inverse=True)
        values = read(".weight.absmax", (_ranges(needed),))
        if not self.nested:
            return values[where]
        numbers = read(".weight.nested_quant_map", None)
        outer, at = torch.unique(needed // self.nested, return_inverse=True)
        largest = read(".weight.nested_absmax", (_ranges(outer),))
        return (numbers[values.long()] * largest[at] + self.offset)[where]

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Flat again; a scale is the number nearest to it."""
        codes = parts["codes"]
        first = torch.arange(-(-shape[0] * shape[1] // self.block)) * self.block
        scales = parts["scales"][first // shape[1], first % shape[1] // self.run(shape)]
        if self.nested:
            largest = constants[".weight.nested_absmax"].repeat_interleave(self.nested)[: len(scales)]
            numbers, order = constants[".weight.nested_quant_map"].double().sort()
            exact = (scales.double() - self.offset) / largest.double()
            scales = order[torch.bucketize(exact, (numbers[1:] + numbers[:-1]) / 2)].to(torch.uint8)
        return {".weight": ((codes << 4) | (codes >> 4)).reshape(-1, 1), ".weight.absmax": scales}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest number, with scales that are not quantized."""
        flat = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % self.block))
        blocks = flat.unflatten(0, (-1, self.block))
        scales = blocks.abs().amax(-1)
        table, order = torch.tensor(self.table).sort()
        scaled = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
        codes = order[torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)].flatten()[: weight.numel()]
        pairs = pack_pairs(codes.to(torch.uint8))
        return {
            ".weight": ((pairs << 4) | (pairs >> 4)).reshape(-1, 1),
            ".weight.absmax": scales,
            **self.new_constants(tuple(weight.shape), weight.dtype),
        }


@dataclass(frozen=True)
class RowwiseInt8(Format):
    """``weight`` of int8, and in ``SCB`` the largest value of each row.

    Attributes:
        inputs: How inputs of layers are quantized.
    """

    inputs: InputQuantization | None = None

    name: ClassVar[str] = "bitsandbytes 8-bit"
    marker: ClassVar[str] = ".SCB"
    stacks: ClassVar[bool] = False
    from_plain: ClassVar[bool] = True
    zero_scales: ClassVar[bool] = True

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Rows."""
        return Encoding(block=(1, shape[-1]))

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """The codes, the largest value of each row, and 1 / 127, by which it becomes a scale."""
        rows = Dim(ROWS)
        return {
            "codes": PartForm(torch.int8, rows, Dim(COLUMNS)),
            "scales": PartForm(torch.float32, rows, Dim(COLUMNS, 1 << 30)),
            "factor": PartForm(torch.float32, rows, Dim(CONSTANT)),
        }

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Values, rows, and a number that says how values are ordered."""
        return {
            ".weight": Tensor(shape, (torch.int8,)),
            ".SCB": Tensor(shape[:-1], (torch.float32,)),
            ".weight_format": Tensor(None, (torch.uint8,), optional=True),
        }

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """That of the values."""
        return tuple(found[".weight"].shape)

    def refined(self, found: Mapping[str, torch.Tensor], read: Read) -> Format:
        """Values in another order than row by row are refused."""
        if ".weight_format" in found and int(read(".weight_format", None)):
            raise CheckpointError(f"weight_format is {int(read('.weight_format', None))}, and only 0 (rows) is known")
        return self

    def constants(self) -> tuple[str, ...]:
        """How values are ordered."""
        return (".weight_format",)

    def new_constants(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Row by row."""
        return {".weight_format": torch.zeros((), dtype=torch.uint8)}

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """As stored."""
        if part == "codes":
            return read(".weight", index)
        if part == "scales":
            return read(".SCB", index[:-1]).unsqueeze(-1)
        return torch.full([sum(b - a for a, b in ranges) for ranges in index], 1 / 127)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As they are."""
        return {".weight": parts["codes"], ".SCB": parts["scales"].squeeze(-1)}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest value of a row becomes 127."""
        largest = weight.float().abs().amax(-1)
        scaled = weight.float() * (127 / torch.where(largest > 0, largest, 1.0)).unsqueeze(-1)
        constants = self.new_constants(tuple(weight.shape), weight.dtype)
        return {".weight": scaled.round().to(torch.int8), ".SCB": largest, **constants}


def parse(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: bitsandbytes``."""
    skipped = data.get("llm_int8_skip_modules")
    if data.get("load_in_4bit") or data.get("_load_in_4bit"):
        kind = data.get("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise CheckpointError(f"quantization_config: bnb_4bit_quant_type={kind!r} is not known: nf4 and fp4 are")
        if (storage := str(data.get("bnb_4bit_quant_storage") or "uint8")) != "uint8":
            raise CheckpointError(f"quantization_config: bnb_4bit_quant_storage={storage!r} is not supported: uint8 is")
        format: Format = FlatBlocks(kind)
    elif data.get("load_in_8bit") or data.get("_load_in_8bit"):
        threshold = float(data.get("llm_int8_threshold", 6.0))
        format = RowwiseInt8(InputQuantization(8, False, group=0, outliers=threshold, through="float16"))
    else:
        raise CheckpointError("quantization_config of bitsandbytes has neither load_in_4bit nor load_in_8bit")
    return Quantization("bitsandbytes", [Rule(format)], skipped, data=data)


def _indices(ranges: Ranges) -> torch.Tensor:
    return torch.cat([torch.arange(a, b) for a, b in ranges]) if ranges else torch.empty(0, dtype=torch.long)


def _ranges(sorted_indices: torch.Tensor) -> Ranges:
    """Sorted indices as ranges."""
    if not len(sorted_indices):
        return ()
    breaks = (sorted_indices.diff() != 1).nonzero().flatten() + 1
    pieces = torch.tensor_split(sorted_indices, breaks.tolist())
    return tuple((int(piece[0]), int(piece[-1]) + 1) for piece in pieces)


def _flat(rows: Ranges, columns: Ranges, width: int) -> Ranges:
    """Where the columns of rows are in the flattened weight."""
    if columns == ((0, width),):
        return tuple((a * width, b * width) for a, b in rows)
    return tuple((r * width + a, r * width + b) for start, stop in rows for r in range(start, stop) for a, b in columns)
