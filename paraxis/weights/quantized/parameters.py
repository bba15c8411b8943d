"""Which parameters of a model are quantized, and how: from the checkpoint, or from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError
from ...placement.blocks import Axis
from ...tensor.parameter_meta import ParameterMeta
from ...tensor.quantized import Part, QuantizedWeight
from ..convert import Conversion
from .activations import BUFFERS, quantize_inputs_of
from .format import COLUMNS, CONSTANT, ROWS, Dim, Format, Quantization
from .pieces import Composition, of_conversion, of_one
from .stored import Header, Stored, new_stored

KEEP_IN_FULL = ("get_output_embeddings", "get_input_embeddings")
"""The modules that methods leave as they are unless their configuration says otherwise."""


def quantized_weight(composition: Composition, shape: tuple[int, ...]) -> QuantizedWeight:
    """How a parameter of this shape is quantized."""
    first = composition.first
    parts = _parts(first.format, first.shape, first.headers, composition, shape)
    encoding = replace(first.format.encoding(first.shape), rounding=first.format.rounding(first.headers))
    return QuantizedWeight(first.format.name, encoding, shape, composition.transposed, parts, composition)


def _parts(
    format: Format,
    stored_shape: tuple[int, ...],
    headers: Mapping[str, torch.Tensor],
    composition: Composition,
    shape: tuple[int, ...],
) -> dict[str, Part]:
    last = len(shape) - 1
    row_dim, column_dim = (last, last - 1) if composition.transposed else (last - 1, last)
    stack = tuple(Axis(shape[dim], dim) for dim in range(len(shape) - 2))

    def axis(dim: Dim) -> Axis:
        if dim.follows == CONSTANT:
            return Axis(dim.size)
        if dim.follows == COLUMNS:
            return Axis.blocks(column_dim, shape[column_dim], dim.block)
        assert dim.follows == ROWS
        return Axis.pieces(row_dim, dim.block, composition.spans)

    found = {}
    for name, form in format.forms(headers, stored_shape).items():
        axes = (axis(form.rows), axis(form.columns))
        if name == "columns":  # an index that all rows and all weights of a stack share
            found[name] = Part(form.dtype, axes[1:])
        else:
            found[name] = Part(form.dtype, (*stack, *axes))
    return found


def compositions(
    keys: Mapping[str, str], conversions: Iterable[Conversion], stored: Mapping[str, Stored]
) -> dict[str, Composition]:
    """The quantized parameters, by name.

    Args:
        keys: For each parameter that is one tensor of the checkpoint, its key.
        conversions: Those that make the other parameters.
        stored: The quantized weights of the checkpoint.
    """
    found = {name: of_one(stored[key]) for name, key in keys.items() if key in stored}
    for conversion in conversions:
        if not conversion.error and any(key in stored for key in conversion.keys):
            found |= of_conversion(conversion, stored)
    return found


def mark_quantized(params: Mapping[str, nn.Parameter], found: Mapping[str, Composition]) -> list[str]:
    """Set on parameters how they are quantized; what does not fit, a line each."""
    problems = []
    for name, composition in found.items():
        parameter = params.get(name)
        if parameter is None:
            continue
        meta: ParameterMeta = parameter.spec  # type: ignore[attr-defined]
        first = composition.first
        if not composition.stacked and first.shape != meta.shape:
            matches = composition.transposed and (*first.shape[:-2], first.shape[-1], first.shape[-2]) == meta.shape
            if not matches:
                problems.append(
                    f"{name} ({first.format.name}): the checkpoint has a weight of shape {first.shape}, the model "
                    f"{meta.shape}"
                )
                continue
        meta.quantized = quantized_weight(composition, meta.shape)
        parameter.requires_grad_(False)
    return problems


def quantize_inputs(model: nn.Module, found: Mapping[str, Composition], device: torch.device) -> list[str]:
    """Make linear layers round their inputs where their format says it; what does not fit, a line each.

    Without a checkpoint, which has the scales of inputs that are not dynamic, these are one.
    """
    problems = []
    for name, composition in found.items():
        how, path = composition.first.format.inputs, name.rpartition(".")[0]
        module = model.get_submodule(path)
        if how is None or not isinstance(module, nn.Linear):
            continue
        scales = dict(composition.first.constants)
        if not composition.first.keys:
            scales = {f".{buffer}": torch.ones(1) for buffer in BUFFERS.values()}
        try:
            for other in composition.stored[1:]:
                if any(not torch.equal(scales[suffix], other.constants[suffix]) for suffix in scales):
                    raise CheckpointError(f"{name}: the weights that it consists of have different scales of inputs")
            quantize_inputs_of(module, name, how, scales, device)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def mark_by_configuration(model: nn.Module, params: Mapping[str, nn.Parameter], quantization: Quantization) -> None:
    """Set on parameters how they will be quantized, without a checkpoint: to plan, or to quantize while loading."""
    found = {}
    for name, format in expected(model, quantization).items():
        if name not in params:
            continue
        shape = tuple(params[name].shape)
        stored_shape = (*shape[:-2], shape[-1], shape[-2]) if format.transposed else shape
        found[name] = of_one(new_stored(name, format, stored_shape, params[name].dtype))
    mark_quantized(params, found)
    devices = [p.device for p in params.values()]
    quantize_inputs(model, found, devices[0] if devices else torch.device("cpu"))


def from_plain(
    model: nn.Module,
    quantization: Quantization,
    keys: Mapping[str, str],
    conversions: Iterable[Conversion],
    header: Header,
) -> dict[str, Composition]:
    """The parameters of a plain checkpoint that will be quantized while they are loaded, by name.

    Args:
        model: The model.
        quantization: What the user wants.
        keys: For each parameter that is one tensor of the checkpoint, its key.
        conversions: Those that make the other parameters.
        header: From a key to a meta tensor of its shape and dtype.

    Raises:
        CheckpointError: the format is one that weights cannot be quantized to.
    """
    for format in quantization.formats:
        problem = format.plain_problem(quantization.data)
        if problem is not None:
            raise CheckpointError(f"quantization_config= ({format.name}): {problem}")
        if not format.from_plain or (format.inputs is not None and format.inputs.needs):
            why = f"is {format.name}, which needs calibration" if format.from_plain else f"is {format.name}"
            raise CheckpointError(
                f"quantization_config= {why}: plain checkpoints can be quantized while they are loaded to fp8, and to "
                "the formats of compressed-tensors and bitsandbytes whose inputs have no scales in the checkpoint"
            )
    wanted, modules = expected(model, quantization), dict(model.named_parameters())
    found = {}
    for name, key in keys.items():
        if name in wanted:
            found[name] = of_one(new_stored(key, wanted[name], tuple(modules[name].shape), modules[name].dtype))
    for conversion in conversions:
        formats = {wanted[name] for name in conversion.targets if name in wanted}
        if len(formats) != 1 or conversion.error or not all(name in wanted for name in conversion.targets):
            continue
        (format,) = formats
        dtype = modules[next(iter(conversion.targets))].dtype
        weights = {key: new_stored(key, format, tuple(header(key).shape), dtype) for key in conversion.keys}
        found |= of_conversion(conversion, weights)
    return found


def expected(model: nn.Module, quantization: Quantization) -> dict[str, Format]:
    """The parameters that are quantized according to the configuration, by name.

    These are the weights of linear layers, and stacks of such weights (experts): parameters of three dimensions that
    are not of torch's own modules.
    """
    full = full_precision(model) if quantization.ignored is None or quantization.keeps_ends else set()
    found = {}
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or id(parameter) in full:
                continue
            name = f"{path}.{leaf}" if path else leaf
            linear = isinstance(module, nn.Linear) and leaf == "weight"
            stack = parameter.dim() == 3 and not type(module).__module__.startswith("torch.nn")
            if linear or stack:
                format = quantization.format_of(path, "Linear" if linear else type(module).__name__)
                if format is not None and (format.linears if linear else format.stacks):
                    found[name] = format
    return found


def full_precision(model: Any) -> set[int]:
    """The parameters that are not quantized unless a configuration says so: those of the input and output layers."""
    modules = [getattr(model, name)() for name in KEEP_IN_FULL if hasattr(model, name)]
    return {id(p) for module in modules if module is not None for p in module.parameters()}


def check_expected(
    model: nn.Module, quantization: Quantization, params: Mapping[str, nn.Parameter], found: Mapping[str, Any]
) -> list[str]:
    """A line for every linear layer that the configuration calls quantized and the checkpoint stores plainly."""
    modules = dict(model.named_modules())
    lines = []
    for name, format in expected(model, quantization).items():
        if name in params and name not in found and isinstance(modules[name.rpartition(".")[0]], nn.Linear):
            lines.append(
                f"{name}: quantized ({format.name}) by quantization_config, but the checkpoint has no "
                f"{name.removesuffix('.weight')}{format.marker}"
            )
    return lines
