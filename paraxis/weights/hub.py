"""From the name of a model to its files, its configuration and its class."""

from __future__ import annotations

import copy
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..compat.transformers import class_from_code, set_attention_implementation, set_experts_implementation
from ..distributed.consensus import all_gather_object, on_all_ranks
from ..errors import CheckpointError
from .file_names import read_index, weight_names
from .pretrained_options import PretrainedOptions
from .weight_map import no_safetensors, no_such_weights, other_formats

MIN_TRANSFORMERS = "5.17.0"

_CONFIG_FILES = ["config.json", "generation_config.json"]
_DOWNLOAD_TIMEOUT = 24 * 3600.0  # seconds that the other ranks wait for the one that downloads


def check_transformers_version() -> None:
    """Raise an ``ImportError`` if the installed transformers is too old."""
    import transformers
    from packaging.version import parse

    if parse(transformers.__version__) < parse(MIN_TRANSFORMERS):
        raise ImportError(
            f"Found an incompatible version of transformers. Found version {transformers.__version__}, but "
            f"Paraxis needs at least {MIN_TRANSFORMERS}."
        )


# -- files ---------------------------------------------------------------------------------------------------


def resolve_checkpoint(
    model: str | os.PathLike[str],
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    weights: bool = True,
    group: dist.ProcessGroup | None = None,
    options: PretrainedOptions | None = None,
) -> Path:
    """The folder with the files of ``model``, a directory or a model id on the Hub. A collective.

    Of the files on the Hub only the configuration is fetched, and with ``weights`` the safetensors. One rank
    per machine downloads; the others wait and then find the files in the cache. If it fails on one rank, it
    fails on all. ``options`` replaces the arguments that it has too.
    """
    if options is None:
        options = PretrainedOptions(revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
    name = os.fspath(model)
    folder = Path(name).expanduser()
    if folder.exists() or _looks_like_path(name):
        folder = folder / options.subfolder
        with on_all_ranks(group, f"finding {name!r}"):
            _check_folder(folder)
        return folder
    downloads = is_first_on_machine(group, f"finding {name!r}")
    with on_all_ranks(group, f"downloading {name!r}", _DOWNLOAD_TIMEOUT):
        if downloads:
            folder = _snapshot(name, weights, options)
    with on_all_ranks(group, f"finding {name!r}"):
        if not downloads:
            folder = _snapshot(name, weights, replace(options, local_files_only=True, force_download=False))
    return folder


def is_first_on_machine(group: dist.ProcessGroup | None, what: str) -> bool:
    """Whether this is the first rank of its machine, which writes files for the others. A collective.

    Ranks on one machine have the same host name, and the same number from the launcher: containers may share host
    names.
    """
    machine = [socket.gethostname(), os.environ.get("GROUP_RANK", "")]
    machines = all_gather_object(group, machine, what)
    return len(machines) == 1 or machines.index(machine) == dist.get_rank(group)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"there is no directory {str(folder)!r}")
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} is a file: pass the directory it is in, with its config.json, or a model id on the Hub"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is not a model saved with `save_pretrained`")


def _snapshot(name: str, weights: bool, options: PretrainedOptions) -> Path:
    """Fetch (or find in the cache) the configuration, then just the files with weights that are needed."""
    from huggingface_hub import snapshot_download

    prefix = f"{options.subfolder.strip('/')}/" if options.subfolder.strip("/") else ""
    download: dict[str, Any] = {
        "revision": options.revision,
        "cache_dir": options.cache_dir,
        "local_files_only": options.local_files_only,
        # exports for other programs live in subfolders
        "ignore_patterns": [f"{prefix}*/*"] if not prefix else None,
    }
    if options.token is not None:
        download["token"] = options.token
    if options.force_download:
        download["force_download"] = True

    def fetch(patterns: list[str]) -> Path:
        try:
            root = snapshot_download(name, allow_patterns=[prefix + pattern for pattern in patterns], **download)
        except Exception as error:
            raise CheckpointError(_not_found(name, options.revision, options.local_files_only, error)) from error
        return Path(root) / options.subfolder

    index_name, single_name = weight_names(options.variant)
    code = ["*.py"] if options.trust_remote_code else []
    where = str(Path(prefix))
    folder = fetch([*_CONFIG_FILES, *code, *([index_name] if weights else [])])
    _check_folder(folder)
    if weights:
        index = folder / index_name
        if index.is_file():
            fetch(sorted(set(read_index(index).values())))
        else:
            fetch(["*.safetensors" if options.variant is None else single_name])
            if options.variant is not None and not (folder / single_name).is_file():
                there = [Path(file).name for file in _files_on_hub(name, options) if str(Path(file).parent) == where]
                raise no_such_weights(name, there, options.variant)
            if not any(folder.glob("*.safetensors")):
                raise no_safetensors(name, other_formats(_files_on_hub(name, options)))
    return folder


def _not_found(name: str, revision: str | None, local_files_only: bool, error: Exception) -> str:
    """Why the files of a model are not available, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name!r} is gated: accept its terms on its page on the Hub, and provide a token of that account "
            "(`hf auth login`, or the environment variable HF_TOKEN). All ranks use it."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name!r} has no revision {revision!r}; use a branch, a tag or a full commit hash"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no model {name!r} on the Hub, and no such directory; if it is private, provide a token "
            "(`hf auth login`, or the environment variable HF_TOKEN)"
        )
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3", "builtins"):
        return f"downloading {name!r} failed: {error}. Try again: complete files are not downloaded again."
    where = "in the local cache" if local_files_only else "on the Hub"
    which = f" (revision {revision!r})" if revision else ""
    return f"cannot find {name!r}{which} {where}, and it is not a directory either: {error}"


def _files_on_hub(name: str, options: PretrainedOptions) -> list[str]:
    from huggingface_hub import HfApi

    if options.local_files_only:
        return []
    try:
        return list(HfApi(token=options.token).list_repo_files(name, revision=options.revision))
    except Exception:  # only used to improve an error message
        return []


# -- configuration and class ---------------------------------------------------------------------------------


def load_config_and_class(
    folder: Path, overrides: dict[str, Any], options: PretrainedOptions | None = None
) -> tuple[Any, type, dict[str, Any]]:
    """The configuration in ``folder``, the class it names, and the ``overrides`` it does not know."""
    import transformers

    options = options or PretrainedOptions()
    where = Path(folder) / "config.json"
    config, unused = _load_config(folder, overrides, options)
    if options.attn_implementation is not None:  # also for configurations that contain others
        set_attention_implementation(config, options.attn_implementation)
    if options.experts_implementation is not None:
        set_experts_implementation(config, options.experts_implementation)
    names = getattr(config, "architectures", None)
    if not names and options.config is not None:
        names = _read_config(folder, {}, options)[0].architectures
    if not names:
        raise CheckpointError(
            f'{where} does not say which class the model is: add `"architectures": ["<a class>"]` to it '
            f"(its model type is {config.model_type!r})"
        )
    reference = _code_of_class(config, names[0])
    if reference is not None and options.trust_remote_code:
        return config, _class_of_code(reference, folder, options), unused
    model_cls = getattr(transformers, names[0], None)
    if model_cls is None:
        raise CheckpointError(
            _untrusted(where, reference)
            if reference is not None
            else f"{where} names the class {names[0]!r}, which transformers {transformers.__version__} does not have. "
            "A newer transformers may have it; build a class of your own yourself and pass the module."
        )
    return config, model_cls, unused


def _load_config(folder: Path, overrides: dict[str, Any], options: PretrainedOptions) -> tuple[Any, dict[str, Any]]:
    """The configuration: the user's, as ``from_pretrained`` takes it, or the one in the folder with overrides."""
    if options.config is None:
        return _read_config(folder, overrides, options)
    if hasattr(options.config, "to_dict"):
        return copy.deepcopy(options.config), overrides
    return _read_config(options.config, overrides, options)


def _read_config(source: Any, overrides: dict[str, Any], options: PretrainedOptions) -> tuple[Any, dict[str, Any]]:
    import transformers

    where = Path(source) / "config.json"
    trust = options.trust_remote_code
    reference = _code_of_config(where)
    if reference is not None and not trust and not _is_known_type(where):
        raise CheckpointError(_untrusted(where, reference))
    try:
        # A bool, never None: transformers asks on the terminal then, and ranks have none.
        code = {"trust_remote_code": trust, "code_revision": options.code_revision} if trust else {}
        found = transformers.AutoConfig.from_pretrained(
            source, local_files_only=not trust or options.local_files_only, return_unused_kwargs=True,
            **{"trust_remote_code": False, **code}, **overrides,
        )  # fmt: skip
    except Exception as error:  # anything that a configuration class raises on the contents of the file
        message = f"transformers {transformers.__version__} cannot read the configuration {where}: {error}"
        raise CheckpointError(message) from error
    return found  # type: ignore[no-any-return]


def _code_of_config(where: Path) -> str | None:
    """The code that a configuration file names for its own class; None if it names none, or cannot be read."""
    try:
        found = json.loads(where.read_text())["auto_map"]["AutoConfig"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def _is_known_type(where: Path) -> bool:
    """Whether transformers has the class of a configuration file itself."""
    from transformers import CONFIG_MAPPING

    return json.loads(where.read_text()).get("model_type") in CONFIG_MAPPING


def _code_of_class(config: Any, name: str) -> str | None:
    """The code that a configuration names for a model class: ``file.Class``, or ``repository--file.Class``."""
    models = {k: v for k, v in (getattr(config, "auto_map", None) or {}).items() if k.startswith("AutoModel")}
    exact = [v for v in models.values() if isinstance(v, str) and v.rpartition(".")[2] == name]
    return exact[0] if exact else None


def _class_of_code(reference: str, folder: Path, options: PretrainedOptions) -> type:
    try:
        return class_from_code(
            reference,
            folder,
            code_revision=options.code_revision,
            cache_dir=options.cache_dir,
            token=options.token,
            local_files_only=options.local_files_only,
        )
    except (OSError, ImportError, AttributeError) as error:
        raise CheckpointError(f"{str(folder / 'config.json')!r} names {reference!r}, which fails: {error}") from error


def _untrusted(where: Path, reference: str) -> str:
    return (
        f"{str(where)!r} names code that comes with the model, {reference!r}, and transformers has no class of its own "
        "for it. Read the code; if you trust it, pass trust_remote_code=True (on the command line --trust-remote-code)."
    )
