"""The state of a training run: sharded parameters, the optimizer's state and numbers of the user's, saved and resumed.

Written with ``torch.distributed.checkpoint``: every rank writes its own shards, at the same time, and any number of
ranks may resume. A state is a directory that appears when it is complete; one that was there before is kept until then.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.consensus import on_all_ranks
from ..errors import CheckpointError
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor
from .save import persistent_buffers

NUMBERS = "paraxis.json"
"""What is not a tensor: settings of the optimizer, and what the user gave."""


def save_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Save a parallel model, its optimizer and ``extra`` (plain data: the step, a scheduler's state) to a directory.

    A collective: every rank must call it. If it fails on one rank, it fails on all, and what the directory held before
    is as it was. :func:`load_state` resumes from it, on any number of ranks.
    """
    target, group = Path(directory), _group(model)
    first = dist.get_rank(group) == 0
    made = target.with_name(f"{target.name}.saving")
    what = f"saving to {str(target)!r}"
    with on_all_ranks(group, what):
        tensors, numbers = _state(model, optimizer)
        text = json.dumps({"optimizer": numbers, "extra": extra})
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{str(target)!r} is a file; give a directory to save to")
    with on_all_ranks(group, what):
        if first:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
    try:
        with on_all_ranks(group, what):
            _write(tensors, made, group)
        with on_all_ranks(group, what):
            if first:
                (made / NUMBERS).write_text(text)
                _replace(made, target)
    finally:
        if first:
            shutil.rmtree(made, ignore_errors=True)


def load_state(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Resume: fill the parameters and the optimizer's state in place; what was saved as ``extra`` is returned.

    A collective. The number of ranks may be another than when it was saved.

    Raises:
        CheckpointError: It is not complete, or not of this model; before anything is changed.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    group = _group(model)
    with on_all_ranks(group, f"loading {str(directory)!r}"):
        source = _complete(Path(directory))
        reader = FileSystemReader(source)
        stored = reader.read_metadata().state_dict_metadata
        data = json.loads((source / NUMBERS).read_text())
        tensors, _ = _state(model, None)
        _check(tensors, stored, source)
        slots = _make_room(model, optimizer, data["optimizer"], stored) if optimizer is not None else {}
    with on_all_ranks(group, f"loading {str(source)!r}"):
        try:
            load(
                {**tensors, **{name: tensor for name, (_, _, tensor) in slots.items()}},
                storage_reader=reader,
                process_group=group,
            )
        except Exception as error:
            raise CheckpointError(f"{str(source)!r} could not be read: {_reason(error)}") from error
        if optimizer is not None:
            _fill(model, optimizer, data["optimizer"], slots)
    return dict(data["extra"])


# -- what there is to save -------------------------------------------------------------------------------------


def _group(model: nn.Module) -> dist.ProcessGroup:
    for parameter in model.parameters():
        if isinstance(parameter, ShardedTensor) and isinstance(parameter._spec, ParameterMeta):
            group = parameter._spec.world_group or parameter._spec.group
            if group is not None:
                return group
    raise TypeError(f"{type(model).__name__} is not a parallel model; give what parallelize_model returned")


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter by its identity; of a tied one the first."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], Any]:
    """Tensors by name, and plain data of the optimizer."""
    tensors: dict[str, Any] = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"model/{name}": buffer for name, buffer in persistent_buffers(model)}
    if optimizer is None:
        return tensors, None
    names, values = _names(model), {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise ValueError("the optimizer has state for a tensor that is no parameter of the model")
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                values[f"{name}/{key}"] = value
    groups = []
    for entry in optimizer.param_groups:
        settings = {key: _number(value) for key, value in entry.items() if key != "params"}
        groups.append({"params": [names.get(id(p)) for p in entry["params"]], **settings})
    return tensors, {"groups": groups, "values": values}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# -- loading ---------------------------------------------------------------------------------------------------


def _complete(directory: Path) -> Path:
    """The directory to read: the one given, or its predecessor if it was just being replaced."""
    for path in (directory, _previous(directory)):
        if (path / ".metadata").is_file() and (path / NUMBERS).is_file():
            return path
    held = sorted(p.name for p in directory.iterdir())[:5] if directory.is_dir() else None
    instead = (
        "there is no such directory" if held is None else f"there is only {', '.join(held)}" if held else "it is empty"
    )
    raise CheckpointError(
        f"{str(directory)!r} holds no complete training state: {instead}. Give a directory that save_state wrote."
    )


def _check(tensors: dict[str, Any], stored: dict[str, Any], source: Path) -> None:
    """That every tensor of the model is there, in its size."""
    missing = [name for name in tensors if name not in stored]
    unexpected = [name for name in stored if name.startswith("model/") and name not in tensors]
    other = [
        f"{name}: {tuple(stored[name].size)} instead of {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in stored and tuple(stored[name].size) != tuple(tensor.shape)
    ]
    problems = [
        f"{text} {', '.join(found[:5])}{' and more' if len(found) > 5 else ''}"
        for text, found in (("missing:", missing), ("not in the model:", unexpected), ("other sizes:", other))
        if found
    ]
    if problems:
        raise CheckpointError(f"{str(source)!r} is not a state of this model; {'; '.join(problems)}")


def _make_room(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Any, stored: dict[str, Any]
) -> dict[str, tuple[torch.Tensor, str, torch.Tensor]]:
    """For every tensor of the optimizer that was saved: its parameter, its key, and a tensor to read it into."""
    if numbers is None:
        raise CheckpointError("the state was saved without an optimizer, and cannot resume one")
    parameters = dict(model.named_parameters())
    saved = [name for group in numbers["groups"] for name in group["params"]]
    names = _names(model)
    own = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    if sorted(map(str, own)) != sorted(map(str, saved)) or len(numbers["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(own)} parameters in {len(optimizer.param_groups)} groups, the saved one "
            f"{len(saved)} in {len(numbers['groups'])}, or others; make it as it was made for the saved run"
        )
    slots: dict[str, tuple[torch.Tensor, str, torch.Tensor]] = {}
    for name, entry in stored.items():
        if not name.startswith("optimizer/"):
            continue
        parameter, key = name.removeprefix("optimizer/").rsplit("/", 1)
        owner, dtype = parameters[parameter], entry.properties.dtype
        if tuple(entry.size) == tuple(owner.shape) and len(entry.size):
            tensor = torch.zeros_like(owner.detach(), dtype=dtype)
        else:
            known = optimizer.state.get(owner, {}).get(key)
            device = known.device if isinstance(known, torch.Tensor) else "cpu" if not len(entry.size) else owner.device
            tensor = torch.zeros(entry.size, dtype=dtype, device=device)
        slots[name] = (owner, key, tensor)
    return slots


def _fill(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: Any,
    slots: dict[str, tuple[torch.Tensor, str, torch.Tensor]],
) -> None:
    parameters, names = dict(model.named_parameters()), _names(model)
    settings = {name: group for group in numbers["groups"] for name in group["params"]}
    optimizer.state.clear()
    for owner, key, tensor in slots.values():
        optimizer.state[owner][key] = tensor
    for name, value in numbers["values"].items():
        parameter, key = name.rsplit("/", 1)
        optimizer.state[parameters[parameter]][key] = value
    for group in optimizer.param_groups:
        saved = settings[names[id(group["params"][0])]] if group["params"] else {}
        group.update({key: _like(group.get(key), value) for key, value in saved.items() if key != "params"})


def _like(old: Any, new: Any) -> Any:
    """Plain data as it was: pairs and numbers on a device come back as lists and numbers."""
    if isinstance(old, tuple):
        return tuple(new)
    return torch.full_like(old, new) if isinstance(old, torch.Tensor) else new


# -- files -----------------------------------------------------------------------------------------------------


def _write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    try:
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=group)
    except Exception as error:
        raise CheckpointError(
            f"could not write the state to {str(folder)!r}: {_reason(error)}. What was there before is as it was."
        ) from error


def _reason(error: BaseException) -> str:
    """What went wrong on the first rank that says so; torch collects the errors of all."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _previous(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.previous")


def _replace(made: Path, target: Path) -> None:
    """Put a complete directory in place. If it ends between the two moves, loading finds the previous one."""
    previous = _previous(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(made, target)
    shutil.rmtree(previous, ignore_errors=True)
