"""Plans kept between runs: the second time a model is brought up, it is not captured and searched again.

A plan is kept under a fingerprint of all that it was made from. Should the fingerprint miss something, a plan that is
out of date may be a slower one, never a wrong one: it says where parameters live, and what happens to the tensors in
between is solved anew for every graph (see :mod:`paraxis.given`).

The directory is ``$PARAXIS_CACHE/plans``, by default ``~/.cache/paraxis/plans``. An empty ``PARAXIS_CACHE``, or
``Config.keep_plans = False``, keeps none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .core import Config, ParallelExecutionCtx
from .given import place, problems_of
from .plan import Plan
from .weights.agree import exchange

KEPT = 200
"""So many plans are kept; the least recently used go."""

IRRELEVANT = {"plan", "weight_init_fn", "init_seed", "show_progress", "check_finite", "keep_plans", "sync_timeout"}
"""Options that a plan does not depend on."""


def directory() -> Path | None:
    """Where plans are kept; None if they are not to be."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("PARAXIS_CACHE", f"{home}/paraxis")
    return Path(root).expanduser() / "plans" if root else None


def recall(key: str | None, ctx: ParallelExecutionCtx) -> bool:
    """Place the parameters by the plan that is kept under a key; False, on all ranks, if there is none. A collective.

    The first rank reads it for all of them, by its key: their disks and environments may differ.
    """
    text = _read(key, ctx) if ctx.is_first else None
    text = exchange(ctx.everybody, text, "looking for a plan that was kept")[0]
    if text is None:
        return False
    place(Plan.from_json(json.loads(text)), ctx)
    return True


def _read(key: str | None, ctx: ParallelExecutionCtx) -> str | None:
    folder = directory()
    if key is None or folder is None:
        return None
    file = folder / f"{key}.json"
    try:
        text = file.read_text()
        if problems_of(Plan.from_json(json.loads(text)), ctx):
            return None
        os.utime(file)  # used just now
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not a plan: one is made and written anew
        return None
    return text


def keep(key: str | None, ctx: ParallelExecutionCtx) -> None:
    """Write the plan that was made, where the next run finds it. What keeps it from being written is no error."""
    folder, plan = directory(), ctx.plan
    if key is None or folder is None or plan is None or plan.breaks or not ctx.is_first:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(plan.to_json(), file)
        os.replace(file.name, folder / f"{key}.json")
        plans = sorted(folder.glob("*.json"), key=lambda f: f.stat().st_mtime, reverse=True)
        for old in plans[KEPT:]:
            old.unlink(missing_ok=True)
    except OSError:
        pass


# -- what a plan is made from ----------------------------------------------------------------------------------------


def fingerprint(model: nn.Module, ctx: ParallelExecutionCtx, config: Config, examples: Any) -> str | None:
    """A key for all that the plan of a model depends on; None if there is no telling.

    A model is told by its configuration, its class and its parameters. So one of transformers has a key, planned with
    inputs that are made up; a module of the user's own, whose forward may be anything, has none.
    """
    described = getattr(model, "config", None)
    if not config.keep_plans or config.pipeline is not None or examples is not None or directory() is None:
        return None
    if not hasattr(described, "to_dict"):
        return None
    options = {f.name: _option(getattr(config, f.name)) for f in fields(config) if f.name not in IRRELEVANT}
    parameters = {
        name: [list(p.shape), str(p.dtype), p.requires_grad, ctx.aliases.get(name)]
        for name, p in ctx.param_cache.items()
    }
    known = {
        "code": [_package(), torch.__version__, _version("transformers"), sys.version_info[:2], _source(type(model))],
        "model": [type(model).__qualname__, _settings(described)],
        "parameters": parameters,
        "ranks": [ctx.world_size, ctx.current_device.type],
        "options": options,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _settings(described: Any) -> dict[str, Any]:
    """A configuration, less where it came from, with the ways to compute that are not written to files."""
    settings = {name: value for name, value in described.to_dict().items() if name != "_name_or_path"}
    chosen = [getattr(described, name, None) for name in ("_attn_implementation", "_experts_implementation")]
    return {**settings, "computed by": chosen}


def _option(value: Any) -> Any:
    if isinstance(value, (str, os.PathLike)) and os.path.isfile(value):  # the description of a machine
        return Path(value).read_text()
    return value


@cache
def _package() -> str:
    """This package, as it is on the disk: whoever works on it must not be given the plans of yesterday's code."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()).hexdigest()


def _source(cls: type) -> str:
    """The file that a class is from: the code of a model may come with its checkpoint."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))
