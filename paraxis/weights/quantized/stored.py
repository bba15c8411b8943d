"""The quantized weights of a checkpoint: which of its tensors are one weight, and whether they fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from ...errors import CheckpointError
from ..load import fill_part
from ..weight_map import DTYPES, OpenFiles
from .format import Format, Index, Quantization, Read

Header = Callable[[str], torch.Tensor]


@dataclass(eq=False)
class Stored:
    """One quantized weight in a checkpoint.

    Attributes:
        key: The name that its parameter would have in the checkpoint.
        format: How it is stored.
        keys: The keys of its tensors, by suffix.
        shape: Its shape.
        headers: Meta tensors of its tensors, by suffix.
        constants: Small tensors that are written back as they are, by suffix.
    """

    key: str
    format: Format
    keys: dict[str, str]
    shape: tuple[int, ...]
    headers: dict[str, torch.Tensor] = field(repr=False)
    constants: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def find_stored(
    weight_map: Mapping[str, str], header: Header, quantization: Quantization, is_module: Callable[[str], bool]
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The quantized weights of a checkpoint by name, and the weight map with one entry for each of them.

    Args:
        weight_map: The keys of the checkpoint, with their files.
        header: From a key to a meta tensor of its shape and dtype.
        quantization: What the configuration says.
        is_module: Whether what is quantized under this name is known to be of the model.

    Raises:
        CheckpointError: with all tensors that are missing or do not fit together.
    """
    found: dict[str, Stored] = {}
    rest = dict(weight_map)
    problems: list[str] = []
    markers = dict.fromkeys((format.marker, format.weight) for format in quantization.formats)
    keys = [(key, marker, weight) for marker, weight in markers for key in weight_map if key.endswith(marker)]
    with OpenFiles() as files:  # opening one reads its header: of a thousand experts, a thousand times
        for key, marker, weight in keys:
            base = key.removesuffix(marker)
            format = quantization.format_of(base)
            if format is None or format.marker != marker:
                if format is None and is_module(base):
                    problems.append(f"{base}: not quantized by quantization_config, but the checkpoint has {key}")
                continue
            try:
                stored = _stored(base, base + weight, format, weight_map, header, files)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            found[stored.key] = stored
            for used in stored.keys.values():
                rest.pop(used, None)
    if problems:
        raise_problems(quantization, problems)
    for name, stored in found.items():
        rest[name] = weight_map[next(iter(stored.keys.values()))]
    return found, rest


def new_stored(key: str, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
    """A weight that will be quantized: without a checkpoint, or from the tensor of this name in a plain one."""
    return Stored(key, format, {}, shape, dict(_headers(format, shape, dtype)), format.new_constants(shape, dtype))


@lru_cache(maxsize=256)
def _headers(format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = format.quantize(torch.empty(shape, dtype=dtype, device="meta"))
    return {suffix: tensor.to("meta") for suffix, tensor in tensors.items()}


def with_stored(header: Header, stored: Mapping[str, Stored], dtype: torch.dtype) -> Header:
    """Headers in which a quantized weight is one tensor."""

    def found(key: str) -> torch.Tensor:
        return torch.empty(stored[key].shape, dtype=dtype, device="meta") if key in stored else header(key)

    return found


def raise_problems(quantization: Quantization, problems: Iterable[str]) -> None:
    """Raise one error with all problems of a quantized checkpoint, if there are any."""
    found = list(problems)
    if found:
        lines = "\n".join(f"  - {problem}" for problem in found[:12])
        more = f"\n  and {len(found) - 12} more" if len(found) > 12 else ""
        raise CheckpointError(
            f"the checkpoint does not fit its quantization_config (quant_method {quantization.method!r}):\n"
            f"{lines}{more}"
        )


def _stored(
    base: str, key: str, format: Format, weight_map: Mapping[str, str], header: Header, files: OpenFiles
) -> Stored:
    """The weight whose keys begin with ``base``, checked from the headers."""

    def read(suffix: str, index: Index | None) -> torch.Tensor:
        return read_box(files[weight_map[base + suffix]], base + suffix, index)

    headers = {s: header(base + s) for s in format.tensors((1, 1)) if base + s in weight_map}
    try:
        shape = format.shape(headers, read)
        format = format.refined(headers, read)
    except CheckpointError as error:
        raise CheckpointError(f"{base} ({format.name}): {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{base} ({format.name}): {base}{error.args[0]} is missing in the checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{base} ({format.name}): {error}") from None
    problems = []
    for suffix, expected in format.tensors(shape).items():
        if suffix not in headers:
            if not expected.optional:
                problems.append(f"{base}{suffix} is missing in the checkpoint")
            continue
        there = headers[suffix]
        if expected.shape is not None and tuple(there.shape) != expected.shape:
            problems.append(
                f"{suffix.lstrip('.')} has shape {tuple(there.shape)} for a weight of {shape}, which needs "
                f"{expected.shape}"
            )
        elif there.dtype not in expected.dtypes:
            names = " or ".join(_name(dtype) for dtype in expected.dtypes)
            problems.append(f"{suffix.lstrip('.')} is {_name(there.dtype)}, not {names}")
    if problems:
        raise CheckpointError(f"{base} ({format.name}): {'; '.join(problems)}")
    constants = {suffix: read(suffix, None) for suffix in format.constants() if suffix in headers}
    return Stored(key, format, {s: base + s for s in headers}, shape, headers, constants)


def reader(stored: Stored, weight_map: Mapping[str, str], files: Mapping[str, object]) -> Read:
    """Reads boxes of the tensors of a weight, through open files."""

    def read(suffix: str, index: Index | None) -> torch.Tensor:
        key = stored.keys[suffix]
        handle = files[weight_map[key]]
        return read_box(handle, key, index)

    return read


def read_box(handle: object, key: str, index: Index | None) -> torch.Tensor:
    """A box of a tensor in an open safetensors file."""
    stored = handle.get_slice(key)  # type: ignore[attr-defined]
    if index is None:
        return handle.get_tensor(key)  # type: ignore[attr-defined,no-any-return]
    shape = tuple(stored.get_shape())
    if all(ranges == ((0, size),) for ranges, size in zip(index, shape, strict=True)):
        return handle.get_tensor(key)  # type: ignore[attr-defined,no-any-return]
    if all(len(ranges) == 1 for ranges in index):
        return stored[tuple(slice(*ranges[0]) for ranges in index)]  # type: ignore[no-any-return]
    sizes = [sum(b - a for a, b in ranges) for ranges in index]
    out = torch.empty(sizes, dtype=dtype_of(stored))
    fill_part(out, handle, key, index)
    return out


def dtype_of(stored: object) -> torch.dtype:
    """The dtype of a slice of a safetensors file."""
    return DTYPES[stored.get_dtype()]  # type: ignore[attr-defined]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
