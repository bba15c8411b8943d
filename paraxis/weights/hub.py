"""From the name of a model to its files, its configuration and its class."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..distributed.consensus import all_gather_object, on_all_ranks
from ..errors import CheckpointError
from .file_names import INDEX_NAME, read_index
from .weight_map import no_safetensors, other_formats

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
) -> Path:
    """The folder with the files of ``model``, a directory or a model id on the Hub. A collective.

    Of the files on the Hub only the configuration is fetched, and with ``weights`` the safetensors. One rank
    per machine downloads; the others wait and then find the files in the cache. If it fails on one rank, it
    fails on all.
    """
    name = os.fspath(model)
    folder = Path(name).expanduser()
    if folder.exists() or _looks_like_path(name):
        with on_all_ranks(group, f"finding {name!r}"):
            _check_folder(folder)
        return folder
    # Ranks on one machine have the same host name, and the same number from the launcher: containers may share host
    # names.
    machine = [socket.gethostname(), os.environ.get("GROUP_RANK", "")]
    machines = all_gather_object(group, machine, f"finding {name!r}")
    rank = dist.get_rank(group) if len(machines) > 1 else 0
    downloads = machines.index(machine) == rank or len(machines) == 1
    options = {"revision": revision, "cache_dir": cache_dir}
    with on_all_ranks(group, f"downloading {name!r}", _DOWNLOAD_TIMEOUT):
        if downloads:
            folder = _snapshot(name, weights, local_files_only, **options)
    with on_all_ranks(group, f"finding {name!r}"):
        if not downloads:
            folder = _snapshot(name, weights, True, **options)
    return folder


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


def _snapshot(name: str, weights: bool, local_files_only: bool, **options: Any) -> Path:
    """Fetch (or find in the cache) the configuration, then just the files with weights that are needed."""
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> Path:
        try:
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=patterns,
                    ignore_patterns=["*/*"],  # exports for other programs live in subfolders
                    local_files_only=local_files_only,
                    **options,
                )
            )
        except Exception as error:
            raise CheckpointError(_not_found(name, options.get("revision"), local_files_only, error)) from error

    folder = fetch([*_CONFIG_FILES, INDEX_NAME] if weights else _CONFIG_FILES)
    _check_folder(folder)
    if weights:
        index = folder / INDEX_NAME
        if index.is_file():
            fetch(sorted(set(read_index(index).values())))
        else:
            fetch(["*.safetensors"])
            if not any(folder.glob("*.safetensors")):
                raise no_safetensors(name, _formats_on_hub(name, options.get("revision"), local_files_only))
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


def _formats_on_hub(name: str, revision: str | None, local_files_only: bool) -> list[str]:
    from huggingface_hub import HfApi

    if local_files_only:
        return []
    try:
        return other_formats(HfApi().list_repo_files(name, revision=revision))
    except Exception:  # only used to improve an error message
        return []


# -- configuration and class ---------------------------------------------------------------------------------


def load_config_and_class(folder: Path, overrides: dict[str, Any]) -> tuple[Any, type, dict[str, Any]]:
    """The configuration in ``folder``, the class it names, and the ``overrides`` it does not know."""
    import transformers

    version = transformers.__version__
    where = Path(folder) / "config.json"
    try:
        config, unused = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, return_unused_kwargs=True, **overrides
        )
    except Exception as error:  # anything that a configuration class raises on the contents of the file
        message = f"transformers {version} cannot read the configuration {where}: {error}"
        raise CheckpointError(message) from error
    names = getattr(config, "architectures", None)
    if not names:
        raise CheckpointError(
            f'{where} does not say which class the model is: add `"architectures": ["<a class>"]` to it '
            f"(its model type is {config.model_type!r})"
        )
    model_cls = getattr(transformers, names[0], None)
    if model_cls is None:
        raise CheckpointError(
            f"{where} names the class {names[0]!r}, which transformers {version} does not have. A newer "
            "transformers may have it; build a class of your own yourself and pass the module."
        )
    return config, model_cls, unused
