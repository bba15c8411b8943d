"""Saving an ordinary transformers checkpoint from the shards of all ranks, file by file.

Rank 0 writes. It never holds more than one file and one parameter: parameters are gathered one after the other,
converted to the form in which the checkpoint stores them (transformers' own conversions, reverted), and written as soon
as a file is full. Files are written to a temporary folder and moved when all are complete, the index last: until then
the directory holds the previous checkpoint.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compat.transformers import keys_to_ignore_on_save, revert_weight_conversion
from ..context import ParallelExecutionCtx
from ..distributed.consensus import on_all_ranks
from ..errors import CheckpointError
from ..tensor.sharded_tensor import ShardedTensor, full_tensor_of
from ..utils.names import block_of
from .file_names import INDEX_NAME, SINGLE_NAME
from .quantized.save import file_metadata, gather_parts, is_quantized, stored_state, stored_tensors

MAX_SHARD_SIZE = "5GB"
"""The default size of a file, which is also what rank 0 holds in memory at a time."""

State = dict[str, torch.Tensor]


@dataclass
class Group:
    """Parameters that are converted together: their names in the model, and the tensors of the checkpoint."""

    names: list[str]
    stored: State
    """Meta tensors by their keys in the checkpoint."""
    quantized: bool = False
    """Whether it is one quantized parameter, which is written as it was read."""


def save_checkpoint(
    model: Any,
    ctx: ParallelExecutionCtx,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = MAX_SHARD_SIZE,
    save_original_format: bool = True,
) -> None:
    """Write the model as transformers' ``save_pretrained`` would. A collective, which fails on all ranks or on none.

    A checkpoint that the directory already has is replaced only when the new one is complete.
    """
    target = Path(directory)
    with on_all_ranks(ctx.world_group, f"saving to {str(target)!r}"):
        values = entries(model)
        encoded = {n: v for n, v in values.items() if is_quantized(v)}
        plain = {n: _plain(v) for n, v in values.items() if n not in encoded}
        groups = grouped(model, plain, save_original_format)
        groups += [Group([n], stored_tensors(n, v), quantized=True) for n, v in encoded.items()]
        files = assign_files(groups, max_shard_size)
        if target.is_file():
            raise NotADirectoryError(f"{str(target)!r} is a file; pass a directory to save to")
        described = file_metadata(ctx.weight_map.values()) if encoded else {}
    temporary = target / f".saving-{secrets.token_hex(4)}"
    first = ctx.is_first
    try:
        with on_all_ranks(ctx.world_group, f"saving to {str(target)!r}"):
            if first:
                temporary.mkdir(parents=True)
                _save_configuration(model, temporary)
        pending: State = {}
        known: set[str] = set()  # the same on every rank, unlike what is pending
        waiting = iter(groups)
        for name, keys in files.items():
            while not known.issuperset(keys):
                group = next(waiting)
                known.update(group.stored)
                pending |= _gathered(model, group, values, ctx, save_original_format)
            with on_all_ranks(ctx.world_group, f"writing {name!r} in {str(target)!r}"):
                if first:
                    _write({key: pending.pop(key) for key in keys}, temporary / name, described)
        with on_all_ranks(ctx.world_group, f"saving to {str(target)!r}"):
            if first:
                move_files(temporary, target, files, groups)
    finally:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)


def _gathered(model: Any, group: Group, values: dict[str, Any], ctx: ParallelExecutionCtx, original: bool) -> State:
    """What is stored for a group, on rank 0. A collective."""
    what = f"saving {', '.join(group.names[:3])}"
    if group.quantized:
        (name,) = group.names
        parts = gather_parts(values[name])
        with on_all_ranks(ctx.world_group, what):
            return {k: t.cpu() for k, t in stored_state(values[name], parts).items()} if ctx.is_first else {}
    gathered = {n: gather(values[n], ctx) for n in group.names}
    with on_all_ranks(ctx.world_group, what):
        return convert(model, gathered, original) if ctx.is_first else {}


# -- what is saved ---------------------------------------------------------------------------------------------


def entries(model: Any) -> dict[str, Any]:
    """Parameters and persistent buffers by name, each tied one once, under the name that loading expects."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(persistent_buffers(model))
    for name in keys_to_ignore_on_save(model):
        found.pop(name, None)
    shapes = {name: _plain(value) for name, value in found.items()}
    saved = remove_tied_weights_from_state_dict(shapes, model)
    return {name: found[name] for name in saved}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of a model that its state dict has, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _plain(value: Any) -> torch.Tensor:
    """A meta tensor of the global shape."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def gather(value: Any, ctx: ParallelExecutionCtx) -> torch.Tensor:
    """The full tensor on rank 0's CPU, an empty one on the other ranks. A collective if the tensor is sharded."""
    full = full_tensor_of(value) if isinstance(value, ShardedTensor) else value.detach()
    return full.cpu() if ctx.is_first else full.new_empty(0)


def convert(model: Any, state: State, original: bool) -> State:
    """The tensors of the checkpoint for some parameters."""
    if not original:
        return state
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(state)).items()}


def grouped(model: Any, state: State, original: bool) -> list[Group]:
    """Which parameters must be converted together.

    Most are stored unchanged, or as several tensors; some checkpoints store one tensor for several parameters. Meta
    tensors show which: first every parameter is converted alone, then those whose result differs from that of all
    parameters together are converted by block.
    """
    together = convert(model, state, original)

    def same(found: State) -> bool:
        return all(
            n in together and (t.shape, t.dtype) == (together[n].shape, together[n].dtype) for n, t in found.items()
        )

    groups: list[Group] = []
    rest: dict[str, list[str]] = {}
    for name in state:
        found = _try_convert(model, {name: state[name]}, original)
        if found is not None and same(found):
            groups.append(Group([name], found))
        else:
            rest.setdefault(block_of(name), []).append(name)
    left: list[str] = []
    for names in rest.values():
        found = _try_convert(model, {n: state[n] for n in names}, original)
        if found is not None and same(found):
            groups.append(Group(names, found))
        else:
            left += names
    if left:
        groups.append(Group(left, convert(model, {n: state[n] for n in left}, original)))
    stored = [name for group in groups for name in group.stored]
    if len(stored) != len(set(stored)) or set(stored) != set(together):
        return [Group(list(state), together)]  # parameters of several blocks depend on one another
    return groups


def _try_convert(model: Any, state: State, original: bool) -> State | None:
    try:
        return convert(model, state, original)
    except Exception:
        return None


def assign_files(groups: list[Group], max_shard_size: int | str) -> dict[str, list[str]]:
    """The names of the files, and the keys in each of them, in the order of the groups."""
    from huggingface_hub import split_state_dict_into_shards_factory

    found = split_state_dict_into_shards_factory(
        {name: tensor for group in groups for name, tensor in group.stored.items()},
        get_storage_size=lambda tensor: tensor.numel() * tensor.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return dict(found.filename_to_tensors)


# -- files -----------------------------------------------------------------------------------------------------


def _save_configuration(model: Any, folder: Path) -> None:
    config = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write(tensors: State, path: Path, described: dict[str, str]) -> None:
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={**described, "format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except Exception as error:  # safetensors raises its own error for a full disk
        size = sum(t.numel() * t.itemsize for t in tensors.values())
        raise CheckpointError(
            f"could not write {path.name} ({size} bytes) to {str(path.parent.parent)!r}: {error}. "
            "The previous checkpoint is unchanged."
        ) from error


def move_files(temporary: Path, target: Path, files: dict[str, list[str]], groups: list[Group]) -> None:
    """Move the files to the target directory, the index last, then remove the files of the previous checkpoint."""
    before = {path.name for path in target.glob("model*.safetensors")} | {INDEX_NAME}
    single = list(files) == [SINGLE_NAME]
    names = {name: name for name in files}
    if not single and before.intersection(files):  # names of the previous checkpoint, which is still valid
        tag = secrets.token_hex(4)
        names = {name: name.replace("model-", f"model-{tag}-", 1) for name in files}
    for name in files if not single else ():
        os.replace(temporary / name, target / names[name])
    for path in temporary.glob("*.json"):
        os.replace(path, target / path.name)
    if single:
        os.replace(temporary / SINGLE_NAME, target / SINGLE_NAME)
    else:
        stored = {name: tensor for group in groups for name, tensor in group.stored.items()}
        index = {
            "metadata": {
                "total_parameters": sum(t.numel() for t in stored.values()),
                "total_size": sum(t.numel() * t.dtype.itemsize for t in stored.values()),
            },
            "weight_map": {key: names[file] for file, keys in files.items() for key in keys},
        }
        draft = temporary / INDEX_NAME
        draft.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(draft, target / INDEX_NAME)
    current = {SINGLE_NAME} if single else {*names.values(), INDEX_NAME}
    for name in before - current:
        (target / name).unlink(missing_ok=True)
