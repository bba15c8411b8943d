"""Saving and resuming a training run: sharded parameters, the optimizer's state and plain data of the user.

Written with ``torch.distributed.checkpoint``: all ranks write their own shards in parallel, and any number of ranks may
resume. A state is a directory, which is replaced only when the new one is complete.
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

from ..distributed.activity import collective_call
from ..distributed.consensus import on_all_ranks
from ..errors import CheckpointError
from ..tensor.parameter_meta import ParameterMeta
from ..tensor.sharded_tensor import ShardedTensor
from .compare_parameters import check_before_saving
from .quantized.save import is_quantized
from .save import persistent_buffers

PLAIN_DATA = "paraxis.json"
"""The file for everything but tensors: settings of the optimizer, and the user's ``extra``."""


@collective_call("save_state")
def save_state(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Save a parallel model, its optimizer and ``extra`` (plain data: the step, a scheduler's state) to a directory.

    A collective: every rank must call it. If it fails on one rank, it fails on all, and the previous state in the
    directory is unchanged. :func:`load_state` resumes from it, on any number of ranks. Quantized parameters are not
    in it: they do not change, and come from their checkpoint.
    """
    target, group = Path(directory), _group(model)
    first = dist.get_rank(group) == 0
    temporary = target.with_name(f"{target.name}.saving")
    what = f"saving to {str(target)!r}"
    check_before_saving(model)
    with on_all_ranks(group, what):
        tensors, settings = _state(model, optimizer)
        text = json.dumps({"optimizer": settings, "extra": extra})
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{str(target)!r} is a file; pass a directory to save to")
    with on_all_ranks(group, what):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        with on_all_ranks(group, what):
            _write(tensors, temporary, group)
        with on_all_ranks(group, what):
            if first:
                (temporary / PLAIN_DATA).write_text(text)
                _replace(temporary, target)
    finally:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)


@collective_call("load_state")
def load_state(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Resume: load the parameters and the optimizer's state in place, and return what was saved as ``extra``.

    A collective. The number of ranks may differ from that of the saved run.

    Raises:
        CheckpointError: The state is incomplete, or not of this model. Nothing has been changed then.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    group = _group(model)
    with on_all_ranks(group, f"loading {str(directory)!r}"):
        source = _complete(Path(directory))
        reader = FileSystemReader(source)
        stored = reader.read_metadata().state_dict_metadata
        data = json.loads((source / PLAIN_DATA).read_text())
        tensors, _ = _state(model, None)
        _check(tensors, stored, source)
        slots = _allocate(model, optimizer, data["optimizer"], stored) if optimizer is not None else {}
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
        if isinstance(parameter, ShardedTensor) and isinstance(parameter.spec, ParameterMeta):
            group = parameter.spec.world_group or parameter.spec.group
            if group is not None:
                return group
    raise TypeError(f"{type(model).__name__} is not a parallel model; pass what parallelize_model returned")


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter by its identity; the first name of a tied one."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], Any]:
    """Tensors by name, and plain data of the optimizer."""
    tensors: dict[str, Any] = {
        f"model/{name}": p.detach() for name, p in model.named_parameters() if not is_quantized(p)
    }
    tensors |= {f"model/{name}": buffer for name, buffer in persistent_buffers(model)}
    if optimizer is None:
        return tensors, None
    names, values = _names(model), {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise ValueError("the optimizer has state for a tensor that is not a parameter of the model")
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
    """The directory to read: this one, or its predecessor if saving ended while it was being replaced."""
    for path in (directory, _previous(directory)):
        if (path / ".metadata").is_file() and (path / PLAIN_DATA).is_file():
            return path
    files = sorted(p.name for p in directory.iterdir())[:5] if directory.is_dir() else None
    if files is None:
        reason = "there is no such directory"
    else:
        reason = f"there is only {', '.join(files)}" if files else "it is empty"
    raise CheckpointError(
        f"{str(directory)!r} holds no complete training state: {reason}. Pass a directory that save_state wrote."
    )


def _check(tensors: dict[str, Any], stored: dict[str, Any], source: Path) -> None:
    """Raise unless every tensor of the model is stored, in its size."""
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


def _allocate(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Any, stored: dict[str, Any]
) -> dict[str, tuple[torch.Tensor, str, torch.Tensor]]:
    """For every saved tensor of the optimizer: its parameter, its key, and an empty tensor to load it into."""
    if settings is None:
        raise CheckpointError("the state was saved without an optimizer, so an optimizer cannot resume from it")
    parameters = dict(model.named_parameters())
    saved = [name for group in settings["groups"] for name in group["params"]]
    names = _names(model)
    own = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    if sorted(map(str, own)) != sorted(map(str, saved)) or len(settings["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(own)} parameters in {len(optimizer.param_groups)} groups, the saved one "
            f"{len(saved)} in {len(settings['groups'])}, or others; create it as for the saved run"
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
    settings: Any,
    slots: dict[str, tuple[torch.Tensor, str, torch.Tensor]],
) -> None:
    """Set the optimizer's state and settings from what was loaded."""
    parameters, names = dict(model.named_parameters()), _names(model)
    saved_groups = {name: group for group in settings["groups"] for name in group["params"]}
    optimizer.state.clear()
    for owner, key, tensor in slots.values():
        optimizer.state[owner][key] = tensor
    for name, value in settings["values"].items():
        parameter, key = name.rsplit("/", 1)
        optimizer.state[parameters[parameter]][key] = value
    for group in optimizer.param_groups:
        saved = saved_groups[names[id(group["params"][0])]] if group["params"] else {}
        group.update({key: _like(group.get(key), value) for key, value in saved.items() if key != "params"})


def _like(old: Any, new: Any) -> Any:
    """Plain data in its old type: JSON has lists for tuples, and numbers for scalar tensors."""
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
            f"could not write the state to {str(folder)!r}: {_reason(error)}. The previous state is unchanged."
        ) from error


def _reason(error: BaseException) -> str:
    """The error of the first rank that failed; torch collects the errors of all."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _previous(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.previous")


def _replace(complete: Path, target: Path) -> None:
    """Move a complete directory to its target. If the process ends between the moves, loading uses the previous one."""
    previous = _previous(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(complete, target)
    shutil.rmtree(previous, ignore_errors=True)
