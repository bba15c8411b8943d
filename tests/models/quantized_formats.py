"""The formats that are tested: what quantizes, the configuration, and what the stored tensors stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from models.quantized import of_blocks

from paraxis.weights.quantized.bits import pack_int32, unpack_int32
from paraxis.weights.quantized.bitsandbytes import FlatBlocks, RowwiseInt8
from paraxis.weights.quantized.compressed_config import parse
from paraxis.weights.quantized.compressed_tensors import NaiveQuantized, PackedIntegers
from paraxis.weights.quantized.fbgemm import parse as fbgemm_config
from paraxis.weights.quantized.format import Format
from paraxis.weights.quantized.fp4 import ExpertsMXFP4, PackedFP4
from paraxis.weights.quantized.fp8 import BlockFP8
from paraxis.weights.quantized.gptq_awq import AWQ, GPTQ, InputsFirst
from paraxis.weights.quantized.torchao import TorchAO

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A format as it is tested.

    Attributes:
        format: What quantizes each weight.
        config: The ``quantization_config``.
        dequantize: The reference: from the stored tensors of a weight, by suffix, and its shape to the weight.
        kinds: The architectures that have it; all by default.
        overrides: Fields of the configuration.
        inputs: The reference: from the input of a linear layer to the rounded one.
    """

    format: Format
    config: Mapping[str, Any]
    dequantize: Callable[[Tensors, tuple[int, ...]], torch.Tensor]
    kinds: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def tolerance(self) -> float:
        """Of logits. An input that is halfway between two codes may be rounded either way, which is one code's step."""
        return 1e-4 if self.inputs is None else 2e-2


def fp8(block: tuple[int, int] | None, **options: Any) -> Case:
    """``quant_method: fp8``."""
    config = {"quant_method": "fp8", "weight_block_size": block and list(block), "activation_scheme": "dynamic"}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        scales = tensors[".weight_scale_inv"]
        return of_blocks(tensors[".weight"], scales.reshape(-1, 1) if block is None else scales, block or shape)

    return Case(BlockFP8(block, **options), {**config, **({"scale_fmt": "ue8m0"} if options else {})}, dequantize)


CASES = {
    "fp8-blocks": fp8((16, 16)),
    "fp8-blocks-ue8m0": fp8((16, 32), power_of_two=True),
    "fp8-tensor": fp8(None),
}
"""The formats by name."""


def bits_of(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes along the last dimension of words or bytes, the first in the low bits, by arithmetic on integers."""
    size = words.dtype.itemsize * 8
    unsigned = words.to(torch.int64) % (1 << size)
    index = torch.arange(count)
    return (unsigned[..., index // (size // bits)] // (1 << (index % (size // bits) * bits))) % (1 << bits)


def packed(bits: int, group: int, symmetric: bool = True, ordered: bool = False) -> Case:
    """``pack-quantized`` of compressed-tensors."""
    args = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "actorder": "group" if ordered else None,
    }
    format: Format = PackedIntegers(bits, group, symmetric, ordered)
    if ordered:
        format = Ordered(bits, group, symmetric, ordered)

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        rows, columns = shape[-2:]
        codes = bits_of(tensors[".weight_packed"], bits, columns)
        scales = tensors[".weight_scale"].double()
        zeros = torch.full(scales.shape, 1 << (bits - 1))
        if not symmetric:
            zeros = bits_of(tensors[".weight_zero_point"].transpose(-1, -2), bits, rows).transpose(-1, -2)
        index = torch.arange(columns) // (group or columns)
        index = tensors[".weight_g_idx"].long() if ordered else index
        return (codes - zeros[..., index]).double() * scales[..., index]

    return Case(format, compressed_tensors("pack-quantized", args), dequantize)


def inputs_first(format: InputsFirst, **config: Any) -> Case:
    """GPTQ and AWQ."""
    bits, group = format.bits, format.group
    config = {"quant_method": format.name, "bits": bits, "group_size": group or -1, **config}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        rows, columns = shape[-2:]
        zeros = bits_of(tensors[".qzeros"], bits, rows) + format.offset
        if format.along_outputs:  # column 8 i + j is at the place of j in 0 2 4 6 1 3 5 7
            at = torch.arange(rows)
            at = at // 8 * 8 + torch.tensor([[0, 2, 4, 6, 1, 3, 5, 7].index(int(j)) for j in at % 8])
            codes, zeros = bits_of(tensors[".qweight"], bits, rows)[:, at], zeros[:, at]
        else:
            codes = bits_of(tensors[".qweight"].t(), bits, columns).t()
        index = tensors[".g_idx"].long() if format.indexed else torch.arange(columns) // (group or columns)
        return ((codes - zeros[index]).double() * tensors[".scales"].double()[index]).t()

    return Case(format, config, dequantize)


class OrderedGPTQ(GPTQ):
    """Groups of inputs in an order of their own."""

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs of a group are not next to one another."""
        columns = weight.shape[-1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        found = super().quantize(weight[..., order])
        codes = unpack_int32(found[".qweight"], self.bits, -2)[:columns]
        back, index = torch.empty_like(codes), torch.empty(columns, dtype=torch.int32)
        back[order], index[order] = codes, found[".g_idx"]
        return {**found, ".qweight": pack_int32(back, self.bits, -2), ".g_idx": index}


def flat_blocks(nested: bool, kind: str = "nf4") -> Case:
    """bitsandbytes with four bits."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    config |= {"bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head", "decoder"]}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        codes = bits_of(tensors[".weight"].flatten(), 4, tensors[".weight"].numel() * 2)
        codes = codes.view(-1, 2).flip(-1).flatten()  # the first is in the high bits
        scales = tensors[".weight.absmax"]
        if nested:
            outer = tensors[".weight.nested_absmax"].repeat_interleave(256)[: len(scales)]
            state = json.loads(bytes(tensors[f".weight.quant_state.bitsandbytes__{kind}"].tolist()))
            scales = tensors[".weight.nested_quant_map"][scales.long()] * outer + state["nested_offset"]
        scales = scales.double().repeat_interleave(64)[: len(codes)]
        return (tensors[".weight.quant_map"].double()[codes] * scales).view(shape)

    return Case(NestedFlatBlocks(kind) if nested else FlatBlocks(kind), config, dequantize)


class NestedFlatBlocks(FlatBlocks):
    """Scales are quantized too, in blocks of 256."""

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scales less their mean are rounded to 256 numbers."""
        found = super().quantize(weight)
        scales = found[".weight.absmax"]
        offset, numbers = float(scales.mean()), torch.linspace(-1, 1, 256)
        outer = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        largest = outer.abs().amax(-1)
        at = ((outer / largest.unsqueeze(-1)).flatten()[: len(scales)].unsqueeze(-1) - numbers).abs().argmin(-1)
        key = f".weight.quant_state.bitsandbytes__{self.kind}"
        state = json.loads(bytes(found[key].tolist()))
        state |= {"nested_offset": offset, "nested_blocksize": 256, "nested_dtype": "float32"}
        return found | {
            ".weight.absmax": at.to(torch.uint8),
            ".weight.nested_absmax": largest,
            ".weight.nested_quant_map": numbers,
            key: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }


class Ordered(PackedIntegers):
    """Groups of columns in an order of their own."""

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns of a group are not next to one another."""
        columns = weight.shape[-1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        sorted_codes = super().quantize(weight[..., order])
        codes = unpack_int32(sorted_codes[".weight_packed"], self.bits, -1)[..., :columns]
        back = torch.empty_like(codes)
        back[..., order] = codes
        index = torch.empty(columns, dtype=torch.int32)
        index[order] = (torch.arange(columns) // self.group).to(torch.int32)
        return {**sorted_codes, ".weight_packed": pack_int32(back, self.bits, -1), ".weight_g_idx": index}


def compressed_tensors(format: str, weights: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A ``quantization_config`` with one group for all linear layers."""
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights), **options}},
        "ignore": ["lm_head", "cls.predictions.decoder"],
    }


def naive(type: str, block: tuple[int, int], symmetric: bool = True) -> Case:
    """``float-quantized`` and ``int-quantized`` of compressed-tensors."""
    strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(block, "group" if block[0] == 1 else "block")
    args = {"num_bits": 8, "type": type, "symmetric": symmetric, "strategy": strategy}
    args |= {"group_size": block[1]} if strategy == "group" else {}
    args |= {"block_structure": list(block)} if strategy == "block" else {}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        full = (block[0] or shape[-2], block[1] or shape[-1])
        scales = tensors[".weight_scale"].reshape(-1, 1) if block == (0, 0) else tensors[".weight_scale"]
        values = tensors[".weight"].double()
        if not symmetric:
            values = values - of_blocks(torch.ones(shape), tensors[".weight_zero_point"].reshape(scales.shape), full)
        return of_blocks(values, scales, full)

    return Case(
        NaiveQuantized(type == "float", block, symmetric), compressed_tensors(f"{type}-quantized", args), dequantize
    )


def with_inputs(case: Case, **args: Any) -> Case:
    """A format of compressed-tensors whose inputs are rounded too, row by row."""
    config = {**case.config}
    (group,) = config["config_groups"].values()
    config["config_groups"] = {
        "group_0": {**group, "input_activations": {"strategy": "token", "dynamic": True, **args}}
    }
    how = parse(config).formats[0].inputs

    def inputs(x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        if args["type"] == "float":
            scale = torch.where(largest > 0, largest / 448, torch.finfo(x.dtype).eps)
            return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
        scale = torch.where(largest > 0, largest / 127.5, torch.finfo(x.dtype).eps)
        return (x / scale).clamp(-128, 127).round() * scale

    return replace(case, format=replace(case.format, inputs=how), config=config, inputs=inputs)


def fbgemm() -> Case:
    """FP8 per row, with rounded inputs."""
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.5}
    config |= {"modules_to_not_convert": ["lm_head", "decoder"]}

    def inputs(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(1e-6, 2.5) / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale

    case = naive("float", (1, 0))
    return Case(fbgemm_config(config).formats[0], config, case.dequantize, inputs=inputs)


def torchao() -> Case:
    """int8 weights of torchao."""

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        return tensors["._weight_qdata"].double() * tensors["._weight_scale"].double()

    kind = {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}}
    config = {"quant_method": "torchao", "quant_type": kind, "modules_to_not_convert": ["lm_head", "decoder"]}
    return Case(TorchAO(), config, dequantize)


def rowwise_int8() -> Case:
    """bitsandbytes with eight bits."""
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "decoder"]}
    config |= {"llm_int8_threshold": 2.5}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        return tensors[".weight"].double() * tensors[".SCB"].double().unsqueeze(-1) / 127

    def inputs(x: torch.Tensor) -> torch.Tensor:
        half = x.half().float()
        large = half.abs() >= 2.5
        inside = half.masked_fill(large, 0)
        scale = inside.abs().amax(-1, keepdim=True) / 127
        rounded = (inside / torch.where(scale > 0, scale, 1)).round() * scale
        return torch.where(large.flatten(0, -2).any(0), x, rounded)

    return Case(RowwiseInt8(), config, dequantize, inputs=inputs)


NUMBERS_OF_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed_fp4(nvidia: bool) -> Case:
    """``mxfp4-pack-quantized`` and ``nvfp4-pack-quantized`` of compressed-tensors."""
    block = 16 if nvidia else 32
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if nvidia else "group", "group_size": block}

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        values = NUMBERS_OF_FP4[bits_of(tensors[".weight_packed"], 4, shape[-1])]
        if not nvidia:
            return of_blocks(values, torch.exp2(tensors[".weight_scale"].double() - 127), (1, block))
        scales = tensors[".weight_scale"].float() / tensors[".weight_global_scale"].float()
        return of_blocks(values, scales, (1, block)).to(torch.bfloat16)

    kind = "nvfp4" if nvidia else "mxfp4"
    return Case(PackedFP4(nvidia), compressed_tensors(f"{kind}-pack-quantized", args), dequantize)


def experts_mxfp4() -> Case:
    """``quant_method: mxfp4``."""

    def dequantize(tensors: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        values = NUMBERS_OF_FP4[bits_of(tensors["_blocks"].flatten(-2), 4, shape[-2])]
        return of_blocks(values, torch.exp2(tensors["_scales"].double() - 127), (1, 32)).transpose(-1, -2)

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}
    return Case(ExpertsMXFP4(), config, dequantize, ("experts",))


CASES |= {
    "ct-int4": packed(4, 32),
    "ct-int4-asymmetric": packed(4, 16, symmetric=False),
    "ct-int4-channel": packed(4, 0),
    "ct-int4-ordered": packed(4, 32, ordered=True),
    "ct-int8": packed(8, 32),
    "ct-int8-asymmetric": packed(8, 0, symmetric=False),
    "ct-float8-tensor": naive("float", (0, 0)),
    "ct-float8-channel": naive("float", (1, 0)),
    "ct-float8-block": naive("float", (16, 32)),
    "ct-w8-channel": naive("int", (1, 0)),
    "ct-w8-asymmetric": naive("int", (1, 32), symmetric=False),
    "ct-mxfp4": packed_fp4(False),
    "ct-nvfp4": packed_fp4(True),
    "mxfp4": experts_mxfp4(),
    "awq": inputs_first(AWQ(4, 16), zero_point=True, version="gemm"),
    "gptq": inputs_first(GPTQ(4, 32, offset=1), desc_act=False),
    "gptq-ordered": inputs_first(OrderedGPTQ(4, 16, offset=1, ordered=None), desc_act=True),
    "ct-w8a8": with_inputs(naive("int", (1, 0)), num_bits=8, type="int"),
    "ct-float8-dynamic": with_inputs(naive("float", (1, 0)), num_bits=8, type="float"),
    "fbgemm-fp8": fbgemm(),
    "torchao-int8": torchao(),
    "bnb-int8": rowwise_int8(),
    "bnb-nf4": flat_blocks(False),
    "bnb-nf4-nested": flat_blocks(True),
    "gptq-v2-int8": inputs_first(GPTQ(8, 0), desc_act=False, checkpoint_format="gptq_v2"),
}
