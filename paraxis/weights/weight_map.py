"""Which tensor in which file of a checkpoint belongs to which parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import CheckpointError
from .convert import Conversion
from .file_names import INDEX_NAME, read_index, weight_names
from .names import CheckpointNames

_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz", ".index")

# safetensors' names of the dtypes whose values may be converted to one another
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
}

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    **{name: dtype for dtype, name in _NAMES.items()},
}


def other_formats(files: Iterable[str]) -> list[str]:
    """Those of ``files`` that have weights in a format other than safetensors."""
    names = (Path(file).name for file in files)
    return sorted(name for name in names if name.endswith(_OTHER_FORMATS) and not name.startswith("training_args"))


def no_safetensors(where: str, found: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint without safetensors files, the format of which ranks can read slices."""
    also = f"only {', '.join(found[:4])}{' ...' if len(found) > 4 else ''}" if found else "no weights at all"
    return CheckpointError(
        f"{where!r} has no weights in safetensors format ({also}). Convert it once: load it with "
        "transformers' `from_pretrained` and save it with `save_pretrained`, then use the new directory. "
        "To run without weights, pass skip_load_weights=True."
    )


def no_such_weights(where: str, files: Iterable[str], variant: str | None, explicit: Any = None) -> CheckpointError:
    """The error for a checkpoint without the weights that were asked for; ``files`` are the names of those it has."""
    there = sorted(name for name in files if ".safetensors" in name)
    why = f"variant={variant!r}" if explicit is None else "transformers_weights in its config.json"
    return CheckpointError(
        f"{where!r} has no {explicit or ' or '.join(reversed(weight_names(variant)))}, the weights of {why}; it has "
        f"{', '.join(there[:6]) or 'no safetensors'}: choose one of these"
    )


@contextmanager
def open_file(path: str) -> Iterator[Any]:
    """An open safetensors file."""
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        message = f"{path!r} is not a readable safetensors file ({error}); it may be incomplete: download it again"
        raise CheckpointError(message) from error
    with file as handle:
        yield handle


class OpenFiles:
    """Safetensors files by path, each one open from its first use to the end."""

    def __init__(self) -> None:
        self._open, self._stack, self._lock = dict[str, Any](), ExitStack(), Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def __getitem__(self, path: str) -> Any:
        with self._lock:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(open_file(path))
            return self._open[path]


def collect_weight_map(folder: str | Path, variant: str | None = None, explicit: Any = None) -> dict[str, str]:
    """For every tensor in the checkpoint in ``folder``, the absolute path of the file it is in.

    If there is an index, it decides; without one the headers of the files are read. A ``model.safetensors`` is then the
    entire checkpoint, whatever other files there are. A ``variant``, and what the configuration names (``explicit``),
    have files of their own.
    """
    folder = Path(folder).absolute()
    index_name, single_name = weight_names(variant, explicit, folder / "config.json")
    index = folder / index_name
    if index_name and index.is_file():
        return _from_index(index.parent, index)
    single = folder / single_name
    chosen = variant is not None or explicit is not None
    files = [single] if single.is_file() or chosen else sorted(folder.glob("*.safetensors"))
    if chosen and not single.is_file():
        raise no_such_weights(str(folder), (path.name for path in folder.iterdir()), variant, explicit)
    if not files:
        raise no_safetensors(str(folder), other_formats(p.name for p in folder.iterdir()))
    weight_map: dict[str, str] = {}
    for file in files:
        with open_file(str(file)) as handle:
            for key in handle.keys():  # noqa: SIM118 -- not a dictionary
                if key in weight_map:
                    raise CheckpointError(
                        f"tensor {key!r} is both in {weight_map[key]!r} and in {str(file)!r}, and there is "
                        f"no {INDEX_NAME} to decide between them: leave only one of them in the directory"
                    )
                weight_map[key] = str(file)
    return weight_map


def _from_index(folder: Path, index: Path) -> dict[str, str]:
    entries = read_index(index)
    missing = sorted({name for name in entries.values() if not (folder / name).is_file()})
    if missing:
        raise CheckpointError(
            f"{str(index)!r} names {len(missing)} files that are not there: {', '.join(missing[:8])}"
            f"{' ...' if len(missing) > 8 else ''}. The download or the copy is incomplete."
        )
    return {key: str(folder / name) for key, name in entries.items()}


def float_dtype(weight_map: Mapping[str, str]) -> torch.dtype | None:
    """The dtype of the first tensor of floating-point numbers, in the order of the files; None if there is none."""
    for file in dict.fromkeys(weight_map.values()):
        with open_file(file) as handle:
            for key in handle.keys():  # noqa: SIM118 -- not a dictionary
                dtype = DTYPES.get(handle.get_slice(key).get_dtype())
                if dtype is not None and dtype.is_floating_point:
                    return dtype
    return None


def header_of(weight_map: Mapping[str, str]) -> Callable[[str], torch.Tensor]:
    """A function from keys of the checkpoint to tensors on ``meta`` of the stored shape and dtype."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def header(key: str) -> torch.Tensor:
        file = weight_map[key]
        if file not in known:
            with open_file(file) as handle:
                known[file] = {name: _described(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
        if key not in known[file]:
            raise CheckpointError(f"{key}: the index says it is in {Path(file).name!r}, where it is not")
        return known[file][key]

    return header


def _described(stored: Any) -> torch.Tensor:
    return torch.empty(stored.get_shape(), dtype=DTYPES.get(stored.get_dtype(), torch.float32), device="meta")


def match_parameters(
    params: Mapping[str, torch.Tensor],
    tied_names: Mapping[str, Sequence[str]],
    weight_map: Mapping[str, str],
    base_model_prefix: str = "",
    model: nn.Module | None = None,
) -> dict[str, str]:
    """For each parameter the key of its tensor in the checkpoint. Parameters without one are not in the result.

    Args:
        params: Parameters (or buffers) by their first names.
        tied_names: All names of those that have several, by first name; the tensor may be saved under any of
            them.
        weight_map: The keys of the checkpoint, with their files.
        base_model_prefix: Name of the model inside the model with a head; keys may have it or lack it.
        model: A transformers model, whose renamings of older checkpoints are then applied.
    """
    all_names = {name: list(tied_names.get(name, [name])) for name in params}
    names = CheckpointNames((n for several in all_names.values() for n in several), base_model_prefix, model)
    found: dict[str, str] = {}
    for key in sorted(weight_map):
        name = names.of(key)
        if name is not None and (name not in found or key == name):
            found[name] = key
    matched: dict[str, str] = {}
    for first, several in all_names.items():
        saved_as = [found[name] for name in (first, *several) if name in found]
        if saved_as:
            matched[first] = saved_as[0]
    return matched


# -- checking ------------------------------------------------------------------------------------------------


def check_checkpoint(
    params: Mapping[str, torch.Tensor],
    keys: Mapping[str, str],
    weight_map: Mapping[str, str],
    tied_names: Mapping[str, Sequence[str]] | None = None,
    conversions: Sequence[Conversion] = (),
) -> None:
    """Raise one error with all mismatches, from the headers, before any weight is read.

    Listed are parameters without a tensor, tensors of another shape, and tensors of a dtype that cannot be converted
    (quantized weights). ``keys`` is the result of :func:`match_parameters`, ``conversions`` that of
    :func:`~paraxis.weights.convert.find_conversions`; the other arguments are the same as theirs. Tied parameters that
    are in the checkpoint under several names must have the same values there.
    """
    converted = {name for conversion in conversions for name in conversion.targets}
    problems = [f"{n}: missing in the checkpoint" for n in params if n not in keys and n not in converted]
    problems += [problem for conversion in conversions for problem in conversion.problems(params)]
    by_file: dict[str, list[str]] = {}
    for name, key in keys.items():
        by_file.setdefault(weight_map[key], []).append(name)
    for file, names in by_file.items():
        with open_file(file) as handle:
            there = set(handle.keys())
            for name in names:
                if keys[name] not in there:
                    problems.append(f"{name}: the index says it is in {Path(file).name!r}, where it is not")
                else:
                    problems += _mismatch(name, keys[name], params[name], handle.get_slice(keys[name]))
    if not problems:
        problems = [p for several in (tied_names or {}).values() for p in _untied(list(several), weight_map)]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"the checkpoint does not fit the model:\n{lines}")


def _mismatch(name: str, key: str, param: torch.Tensor, stored: Any) -> list[str]:
    label = name if key == name else f"{name} (in the checkpoint {key})"
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != tuple(param.shape):
        return [f"{label}: shape {shape} in the checkpoint, {tuple(param.shape)} in the model"]
    expected = _NAMES.get(param.dtype)
    if dtype != expected and not (expected is None and dtype in _FLOATS):
        return [
            f"{label}: {dtype} in the checkpoint, {param.dtype} in the model; the model's "
            "configuration has no quantization_config that says how it is quantized"
        ]
    return []


def _untied(names: list[str], weight_map: Mapping[str, str]) -> list[str]:
    """A line for each pair of names of one parameter under which the checkpoint has different values."""
    present = [name for name in names if name in weight_map]
    lines = []
    for name in present[1:]:
        if not _equal(present[0], name, weight_map):
            lines.append(
                f"{name}: tied to {present[0]} in the model, but the checkpoint has different values for "
                "them. If they are word embeddings, pass tie_word_embeddings=False"
            )
    return lines


def _equal(first: str, second: str, weight_map: Mapping[str, str], rows: int = 4096) -> bool:
    """Whether two tensors are equal, read by blocks of rows."""
    with open_file(weight_map[first]) as a, open_file(weight_map[second]) as b:
        x, y = a.get_slice(first), b.get_slice(second)
        if x.get_shape() != y.get_shape():
            return False
        if not x.get_shape():
            return torch.equal(a.get_tensor(first), b.get_tensor(second))
        starts = range(0, x.get_shape()[0], rows)
        return all(torch.equal(x[i : i + rows], y[i : i + rows]) for i in starts)
