"""What a configuration of compressed tensors says: groups of modules, each with a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointError
from .activations import InputQuantization
from .compressed_tensors import NaiveQuantized, PackedIntegers, check_group
from .format import Format, Quantization, Rule
from .fp4 import MX_BLOCK, NV_BLOCK, PackedFP4

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)
MIXED, DENSE = "mixed-precision", ("dense", None, "")


def parse(data: Mapping[str, Any]) -> Quantization:
    """The configuration of ``quant_method: compressed-tensors``."""
    data = data.get("quantization_config") or data
    status = data.get("quantization_status", "compressed")
    if status != "compressed":
        raise _unknown(f"quantization_status={status!r}", "compressed")
    for key in ("transform_config", "kv_cache_scheme"):
        if data.get(key):
            raise CheckpointError(f"quantization_config: {key} is not supported; it is {data[key]!r}")
    sparsity = (data.get("sparsity_config") or {}).get("format")
    if sparsity not in DENSE:
        raise _unknown(f"sparsity_config with format={sparsity!r}", "dense")
    rules: list[Rule] = []
    for name, group in data["config_groups"].items():
        if isinstance(group, (list, tuple)):  # the name is a scheme, and this is what it is for
            raise _unknown(f"config_groups[{name!r}]={group!r}", "a dictionary with targets and weights")
        if group.get("weights") is None:
            continue
        kind = group.get("format") or data.get("format")
        found = _format(kind, group)
        rules += [Rule(found, [target]) for target in group["targets"]]
    rules.sort(key=lambda rule: _precedence(rule.targets))
    return Quantization("compressed-tensors", rules, list(data.get("ignore") or []), loose=False, data=data)


def _precedence(targets: Sequence[str]) -> int:
    """Names of modules come before patterns, and patterns before names of classes."""
    (target,) = targets
    return 1 if target.startswith("re:") else 0 if "." in target else 2


def _format(kind: Any, group: Mapping[str, Any]) -> Format:
    weights = group["weights"]
    bits, floating = weights.get("num_bits", 8), weights.get("type", "int") == "float"
    if kind in (None, MIXED):
        kind = _inferred(weights, bits, floating, group)
    if kind not in FORMATS:
        raise _unknown(f"format={kind!r}", *FORMATS)
    if group.get("output_activations"):
        raise CheckpointError("quantization_config: quantized outputs (output_activations) are not supported")
    inputs = _inputs(group.get("input_activations"))
    if kind in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        expected = MX_BLOCK if kind.startswith("mx") else NV_BLOCK
        if weights.get("group_size", expected) != expected:
            raise _unknown(f"group_size={weights['group_size']} of {kind}", str(expected))
        return PackedFP4(kind.startswith("nv"), inputs)
    symmetric = bool(weights.get("symmetric", True))
    block = _block(weights)
    if kind == "pack-quantized":
        if bits not in (4, 8) or floating:
            raise _unknown(f"num_bits={bits} of type {weights.get('type')!r} in pack-quantized", "4 and 8 of 'int'")
        if block[0] != 1:
            raise _unknown(f"strategy={weights.get('strategy')!r} of pack-quantized", "group", "channel")
        return PackedIntegers(bits, block[1], symmetric, weights.get("actorder") in ("group", "dynamic", True), inputs)
    if bits != 8:
        raise _unknown(f"num_bits={bits} in {kind}", "8")
    return NaiveQuantized(floating, block, symmetric, inputs)


def _inferred(weights: Mapping[str, Any], bits: int, floating: bool, group: Mapping[str, Any]) -> str:
    """The format of a group of a mixed checkpoint that does not name one, as the library chooses it."""
    if floating and bits == 4:
        return "nvfp4-pack-quantized" if weights.get("group_size") == NV_BLOCK else "mxfp4-pack-quantized"
    if floating:
        return "float-quantized"
    return "int-quantized" if group.get("input_activations") and bits == 8 else "pack-quantized"


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that have one scale; 0 for all."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "tensor":
        return (0, 0)
    if strategy == "channel":
        return (1, 0)
    if strategy == "group":
        return (1, check_group(size, "group_size"))
    if strategy == "block":
        structure = weights.get("block_structure")
        if isinstance(structure, str):
            structure = [int(n) for n in structure.split("x")]
        if not isinstance(structure, (list, tuple)) or len(structure) != 2 or min(structure) < 1:
            raise _unknown(f"block_structure={structure!r}", "two positive numbers")
        return (int(structure[0]), int(structure[1]))
    raise _unknown(f"strategy={strategy!r} of weights", "tensor", "channel", "group", "block")


def _inputs(data: Mapping[str, Any] | None) -> InputQuantization | None:
    """How inputs are quantized."""
    if not data:
        return None
    bits, floating = data.get("num_bits", 8), data.get("type", "int") == "float"
    if bits not in ((4, 8) if floating else (8,)):
        raise _unknown(f"input_activations with num_bits={bits} of type {data.get('type')!r}", "8", "4 of 'float'")
    size, dynamic = data.get("group_size"), data.get("dynamic", False)
    strategy = data.get("strategy") or ("tensor" if size is None else "group")
    symmetric = bool(data.get("symmetric", True))
    if strategy == "tensor_group":
        if dynamic is not True and dynamic != "local":
            raise _unknown("input_activations with strategy='tensor_group' that are not dynamic", "'local'")
        return InputQuantization(bits, floating, symmetric, check_group(size, "group_size"), True, True)
    if strategy == "group" and dynamic:
        return InputQuantization(bits, floating, symmetric, check_group(size, "group_size"))
    if strategy == "token" or (strategy == "tensor" and dynamic):
        return InputQuantization(bits, floating, symmetric, 0 if strategy == "token" else -1)
    if strategy == "tensor":
        return InputQuantization(bits, floating, symmetric, -1, dynamic=False)
    raise _unknown(f"strategy={strategy!r} of input_activations", "token", "tensor", "group", "tensor_group")


def _unknown(what: str, *known: str) -> CheckpointError:
    return CheckpointError(f"quantization_config of compressed-tensors: {what} is not supported; {', '.join(known)} is")
