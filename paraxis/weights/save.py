"""Saving an ordinary checkpoint from the shards of all ranks, file by file.

The first rank writes. It never holds more than one file and one parameter: parameters are gathered one after the other,
brought into the form in which the checkpoint stores them (transformers' own conversions, undone), and written as soon
as a file is full. Files are written under names that nothing reads yet, and put in place when all are there, the one
that makes them a checkpoint last: until then the directory holds what it held before.
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

from ..context import ParallelExecutionCtx
from ..distributed.consensus import on_all_ranks
from ..errors import CheckpointError
from ..tensor.sharded_tensor import ShardedTensor, full_tensor_of
from ..utils.names import block_of
from .weight_map import INDEX_NAME

SINGLE_NAME = "model.safetensors"
MAX_FILE = "5GB"
"""The size of a file unless asked otherwise; the first rank holds so much at a time."""

State = dict[str, torch.Tensor]


@dataclass
class Group:
    """Parameters that are stored together: what they are called here, and what in the checkpoint."""

    names: list[str]
    stored: State
    """Without memory: shapes and dtypes alone."""


def save_checkpoint(
    model: Any,
    ctx: ParallelExecutionCtx,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = MAX_FILE,
    save_original_format: bool = True,
) -> None:
    """Write the model as plain transformers would. A collective; if it fails on one rank, it fails on all.

    A directory that holds a checkpoint already keeps it until the new one is complete.
    """
    target = Path(directory)
    with on_all_ranks(ctx.world_group, f"saving to {str(target)!r}"):
        values = entries(model)
        groups = grouped(model, {n: _plain(v) for n, v in values.items()}, save_original_format)
        files = split(groups, max_shard_size)
        if target.is_file():
            raise NotADirectoryError(f"{str(target)!r} is a file; give a directory to save to")
    made = target / f".saving-{secrets.token_hex(4)}"
    first = ctx.is_first
    try:
        with on_all_ranks(ctx.world_group, f"saving to {str(target)!r}"):
            if first:
                made.mkdir(parents=True)
                _save_configuration(model, made)
        pending: State = {}
        known: set[str] = set()  # the same on every rank, unlike what is pending
        waiting = iter(groups)
        for name, wanted in files.items():
            while not known.issuperset(wanted):
                group = next(waiting)
                known.update(group.stored)
                gathered = {n: gather(values[n], ctx) for n in group.names}
                with on_all_ranks(ctx.world_group, f"saving {', '.join(group.names[:3])}"):
                    if first:
                        pending |= convert(model, gathered, save_original_format)
            with on_all_ranks(ctx.world_group, f"writing {name!r} in {str(target)!r}"):
                if first:
                    _write({key: pending.pop(key) for key in wanted}, made / name)
        with on_all_ranks(ctx.world_group, f"saving to {str(target)!r}"):
            if first:
                put_in_place(made, target, files, groups)
    finally:
        if first:
            shutil.rmtree(made, ignore_errors=True)


# -- what is saved ---------------------------------------------------------------------------------------------


def entries(model: Any) -> dict[str, Any]:
    """Parameters and persistent buffers by name, each tied one once, under the name that is read again."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(persistent_buffers(model))
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        found.pop(name, None)
    shapes = {name: _plain(value) for name, value in found.items()}
    kept = remove_tied_weights_from_state_dict(shapes, model)
    return {name: found[name] for name in kept}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _plain(value: Any) -> torch.Tensor:
    """A tensor without memory that is like the whole of a sharded one."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def gather(value: Any, ctx: ParallelExecutionCtx) -> torch.Tensor:
    """The whole tensor on the first rank's CPU, nothing on the others. A collective for a sharded one."""
    if isinstance(value, ShardedTensor):
        whole = full_tensor_of(value)
    else:
        whole = value.detach()
    return whole.cpu() if ctx.is_first else whole.new_empty(0)


def convert(model: Any, state: State, original: bool) -> State:
    """The form in which a checkpoint stores some parameters."""
    if not original:
        return state
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(state)).items()}


def grouped(model: Any, state: State, original: bool) -> list[Group]:
    """Which parameters have to be there together for the checkpoint's form of them.

    Most are stored as they are, or as several tensors; some checkpoints store one tensor for several parameters. That
    is tried, without memory: first each by itself, then those that gave something else than all together do by block.
    """
    whole = convert(model, state, original)

    def alike(found: State) -> bool:
        return all(n in whole and (t.shape, t.dtype) == (whole[n].shape, whole[n].dtype) for n, t in found.items())

    groups: list[Group] = []
    rest: dict[str, list[str]] = {}
    for name in state:
        found = _tried(model, {name: state[name]}, original)
        if found is not None and alike(found):
            groups.append(Group([name], found))
        else:
            rest.setdefault(block_of(name), []).append(name)
    left: list[str] = []
    for names in rest.values():
        found = _tried(model, {n: state[n] for n in names}, original)
        if found is not None and alike(found):
            groups.append(Group(names, found))
        else:
            left += names
    if left:
        groups.append(Group(left, convert(model, {n: state[n] for n in left}, original)))
    stored = [name for group in groups for name in group.stored]
    if len(stored) != len(set(stored)) or set(stored) != set(whole):
        return [Group(list(state), whole)]  # names depend on one another in another way
    return groups


def _tried(model: Any, state: State, original: bool) -> State | None:
    try:
        return convert(model, state, original)
    except Exception:
        return None


def split(groups: list[Group], max_shard_size: int | str) -> dict[str, list[str]]:
    """The names of the files, and what each of them holds, in the order of the groups."""
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


def _write(tensors: State, path: Path) -> None:
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except Exception as error:  # safetensors has an error of its own for a full disk
        size = sum(t.numel() * t.itemsize for t in tensors.values())
        raise CheckpointError(
            f"could not write {path.name} ({size} bytes) to {str(path.parent.parent)!r}: {error}. "
            "What was there before is as it was."
        ) from error


def put_in_place(made: Path, target: Path, files: dict[str, list[str]], groups: list[Group]) -> None:
    """Move the files where they belong: what makes a checkpoint of them last, then remove what it replaces."""
    before = {path.name for path in target.glob("model*.safetensors")} | {INDEX_NAME}
    single = list(files) == [SINGLE_NAME]
    names = {name: name for name in files}
    if not single and before.intersection(files):  # other weights have these names until the index says otherwise
        tag = secrets.token_hex(4)
        names = {name: name.replace("model-", f"model-{tag}-", 1) for name in files}
    for name in files if not single else ():
        os.replace(made / name, target / names[name])
    for path in made.glob("*.json"):
        os.replace(path, target / path.name)
    if single:
        os.replace(made / SINGLE_NAME, target / SINGLE_NAME)
    else:
        stored = {name: tensor for group in groups for name, tensor in group.stored.items()}
        index = {
            "metadata": {
                "total_parameters": sum(t.numel() for t in stored.values()),
                "total_size": sum(t.numel() * t.dtype.itemsize for t in stored.values()),
            },
            "weight_map": {tensor: names[file] for file, held in files.items() for tensor in held},
        }
        draft = made / INDEX_NAME
        draft.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(draft, target / INDEX_NAME)
    kept = {SINGLE_NAME} if single else {*names.values(), INDEX_NAME}
    for name in before - kept:
        (target / name).unlink(missing_ok=True)
