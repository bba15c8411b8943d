"""GPTQ and AWQ: ``qweight``, ``qzeros`` and ``scales`` with the inputs of a layer first, in 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError
from ...kernels.quantized import Encoding
from ...placement import Ranges
from .bits import bytes_as_codes, pack_int32, pack_pairs, read_words, unpack_pairs
from .compressed_tensors import check_group
from .format import COLUMNS, CONSTANT, ROWS, Dim, Format, Index, PartForm, Quantization, Read, Rule, Tensor
from .format import reduced_precision as reduced
from .fp8 import FLOATS
from .integers import integer_encoding, quantize_integers

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of eight columns."""
PROBE = 64
"""How many entries of an index of groups are looked at where the configuration says that it is regular."""


@dataclass(frozen=True)
class InputsFirst(Format):
    """What both have in common; the weight is the transposed of what is stored.

    Attributes:
        bits: Of an integer.
        group: How many inputs have one scale; 0 for all.
        along_outputs: Whether words have integers of several outputs, in the order of AWQ; otherwise of several inputs.
        offset: What is added to zero points that are stored.
        ordered: Whether the groups of inputs are in ``g_idx``; None where that is not known yet.
        indexed: Whether there is a ``g_idx``.
    """

    bits: int = 4
    group: int = 128
    along_outputs: bool = False
    offset: int = 0
    ordered: bool | None = False
    indexed: bool = False

    name: ClassVar[str] = "gptq"
    marker: ClassVar[str] = ".qweight"

    def encoding(self, shape: tuple[int, ...]) -> Encoding:
        """Groups of columns."""
        return integer_encoding((1, self.group or shape[-1]), self.bits, symmetric=False)

    def rounding(self, found: Mapping[str, torch.Tensor]) -> str:
        """Values are computed in the dtype of the scales."""
        return reduced(found[".scales"])

    def forms(self, found: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, PartForm]:
        """Codes of four bits are packed in pairs; groups that are not in order are on all ranks."""
        scales = found[".scales"]
        groups = Dim(CONSTANT, size=scales.shape[-2]) if self.ordered else Dim(COLUMNS, self.group or 1 << 30)
        forms = {
            "codes": PartForm(torch.uint8, Dim(ROWS), Dim(COLUMNS, 2) if self.bits == 4 else Dim(COLUMNS)),
            "scales": PartForm(scales.dtype, Dim(ROWS), groups),
            "zeros": PartForm(torch.uint8 if self.bits == 4 else torch.int16, Dim(ROWS), groups),
        }
        return forms | ({"columns": PartForm(torch.int32, Dim(CONSTANT), Dim(COLUMNS))} if self.ordered else {})

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Words, zero points, scales, and the index of groups."""
        *stack, outputs, inputs = shape
        count = 32 // self.bits
        groups = -(-inputs // self.group) if self.group else 1
        words = (inputs, -(-outputs // count)) if self.along_outputs else (-(-inputs // count), outputs)
        found = {
            ".qweight": Tensor((*stack, *words), (torch.int32,)),
            ".qzeros": Tensor((*stack, groups, -(-outputs // count)), (torch.int32,)),
            ".scales": Tensor((*stack, groups, outputs), FLOATS),
        }
        return found | ({".g_idx": Tensor((inputs,), (torch.int32,), optional=True)} if self.indexed else {})

    def shape(self, found: Mapping[str, torch.Tensor], read: Read) -> tuple[int, ...]:
        """The inputs are those of the index where there is one, because a last word may not be full."""
        *stack, first, second = found[".qweight"].shape
        outputs = found[".scales"].shape[-1]
        if self.along_outputs:
            return (*stack, outputs, first)
        index = found.get(".g_idx")
        return (*stack, second, first * 32 // self.bits if index is None else index.shape[-1])

    def refined(self, found: Mapping[str, torch.Tensor], read: Read) -> Format:
        """Whether the groups are in order is what ``g_idx`` says; a regular one takes no memory."""
        index = found.get(".g_idx")
        if index is None:
            return replace(self, ordered=False)
        inputs, group = index.shape[-1], self.group or index.shape[-1]
        ends: list[Ranges] = [((0, min(PROBE, inputs)),), ((max(inputs - PROBE, 0), inputs),)]
        for ranges in ends if self.ordered is False else [((0, inputs),)]:
            values = read(".g_idx", (ranges,)).long()
            groups, (start, stop) = -(-inputs // group), ranges[0]
            if int(values.min()) < 0 or int(values.max()) >= groups:
                worst = int(values.min()) if int(values.min()) < 0 else int(values.max())
                raise CheckpointError(f"g_idx has {worst}, and there are {groups} groups of {group} inputs")
            if not torch.equal(values, torch.arange(start, stop) // group):
                if self.ordered is False:
                    raise CheckpointError("g_idx is not in order, but quantization_config has desc_act=False")
                return replace(self, ordered=True)
        return replace(self, ordered=False)

    def load(self, part: str, index: Index, read: Read, shape: tuple[int, ...]) -> torch.Tensor:
        """Only the words that have a code of the box are read."""
        if part == "columns":
            return read(".g_idx", index)
        flipped = (*index[:-2], index[-1], index[-2])
        order = AWQ_ORDER if self.along_outputs else ()
        if part == "scales":
            found = read(".scales", flipped)
        elif part == "zeros":
            found = read_words(lambda box: read(".qzeros", box), flipped, self.bits, -1, shape[-2], order)
            found = (found if self.bits == 4 else found.to(torch.int16)) + self.offset
        else:
            columns = bytes_as_codes(index[-1], shape[-1]) if self.bits == 4 else index[-1]
            box = (*index[:-2], columns, index[-2])
            dim, size = (-1, shape[-2]) if self.along_outputs else (-2, shape[-1])
            found = read_words(lambda box: read(".qweight", box), box, self.bits, dim, size, order)
            found = found.transpose(-1, -2)
            return pack_pairs(found) if self.bits == 4 else found
        return found.transpose(-1, -2)

    def store(
        self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Packed again."""
        codes = unpack_pairs(parts["codes"], shape[-1]) if self.bits == 4 else parts["codes"]
        order = AWQ_ORDER if self.along_outputs else ()
        zeros = (parts["zeros"].transpose(-1, -2) - self.offset).to(torch.uint8) & ((1 << self.bits) - 1)
        found = {
            ".qweight": pack_int32(codes.transpose(-1, -2), self.bits, -1 if self.along_outputs else -2, order),
            ".qzeros": pack_int32(zeros, self.bits, -1, order),
            ".scales": parts["scales"].transpose(-1, -2),
        }
        if self.indexed:
            regular = (torch.arange(shape[-1]) // (self.group or shape[-1])).to(torch.int32)
            found[".g_idx"] = parts.get("columns", regular)
        return found

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest, with groups in order."""
        codes, scales, zeros = quantize_integers(weight, (1, self.group or weight.shape[-1]), self.bits, False)
        half = 1 << (self.bits - 1)
        low = max(self.offset, 0)  # a zero point of zero cannot be stored with an offset
        return self.store(
            {
                "codes": pack_pairs((codes.int() + half).to(torch.uint8)) if self.bits == 4 else (codes.int() + half),
                "scales": scales,
                "zeros": (zeros.int() + half).clamp(min=low),
            },
            tuple(weight.shape),
            {},
        )


@dataclass(frozen=True)
class GPTQ(InputsFirst):
    """Words of several inputs; in version 1 zero points are stored less one."""

    indexed: bool = True


@dataclass(frozen=True)
class AWQ(InputsFirst):
    """Words of several outputs, in an order of their own."""

    along_outputs: bool = True

    name: ClassVar[str] = "awq"


def parse_gptq(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: gptq``."""
    version = data.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"quantization_config: checkpoint_format={version!r} of gptq is not known: gptq and gptq_v2 are"
        )
    base = GPTQ(
        _bits(data, (4, 8)),
        _group(data),
        offset=1 if version == "gptq" else 0,
        ordered=None if data.get("desc_act") or data.get("static_groups") else False,
    )
    rules, ignored = [Rule(base)], []
    for pattern, changes in (data.get("dynamic") or {}).items():
        name = pattern.removeprefix("-:").removeprefix("+:")
        if pattern.startswith("-:"):
            ignored.append(f"re:{name}")
            continue
        own = {**data, **changes}
        rules.insert(-1, Rule(replace(base, bits=_bits(own, (4, 8)), group=_group(own)), [f"re:{name}"]))
    chosen = data.get("modules_in_block_to_quantize")
    if chosen:
        names = [name for several in chosen for name in ([several] if isinstance(several, str) else several)]
        rules = [Rule(rule.format, [f"re:.*\\.{name}$" for name in names]) for rule in rules]
    return Quantization("gptq", rules, [*ignored, *_listed(data)], data=data, keeps_ends=not data.get("lm_head"))


def parse_awq(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: awq``."""
    version = str(data.get("version", data.get("format")) or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"quantization_config: version={version!r} of awq is not supported: 'gemm' is")
    format = AWQ(_bits(data, (4,)), _group(data))
    return Quantization("awq", [Rule(format)], _listed(data), data=data, keeps_ends=True)


def _listed(data: Mapping[str, Any]) -> list[str]:
    return list(data.get("modules_to_not_convert") or [])


def _bits(data: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = data.get("bits", data.get("w_bit", 4))
    if bits not in known:
        raise CheckpointError(
            f"quantization_config: bits={bits!r} is not supported; {' and '.join(map(str, known))} bits are"
        )
    return int(bits)


def _group(data: Mapping[str, Any]) -> int:
    group = data.get("group_size", data.get("q_group_size", 128))
    return 0 if group == -1 else check_group(group, "group_size")
