"""From a model's name to its files, configuration and class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch.distributed as dist
import transformers
from weights.tiny_models import save, tiny_model

from paraxis.errors import CheckpointError
from paraxis.weights.hub import check_transformers_version, load_config_and_class, resolve_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, files: int = 1) -> Path:
    """A model in the layout of the Hub's cache, under the id ``someone/tiny``."""
    repo = cache / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return save(tiny_model("GPT2LMHeadModel"), repo / "snapshots" / COMMIT, files)


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    save(tiny_model("GPT2LMHeadModel"), tmp_path)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_paths_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        resolve_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint(tmp_path / "model.safetensors")


def test_cached_models_resolve_offline(tmp_path: Path) -> None:
    folder = cached(tmp_path, 3)
    found = resolve_checkpoint("someone/tiny", cache_dir=tmp_path, local_files_only=True)
    assert found.resolve() == folder.resolve()
    with pytest.raises(CheckpointError, match="cannot find 'someone/else' in the local cache"):
        resolve_checkpoint("someone/else", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match=r"cannot find 'someone/tiny' \(revision 'v2'\)"):
        resolve_checkpoint("someone/tiny", "v2", tmp_path, local_files_only=True)


def test_only_needed_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the configuration, and of the weights only the files of the index."""
    save(tiny_model("GPT2LMHeadModel"), tmp_path, 3)
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_checkpoint("someone/tiny", weights=False)
    assert asked == [["config.json", "generation_config.json"]]
    asked.clear()
    resolve_checkpoint("someone/tiny")
    assert asked[0] == ["config.json", "generation_config.json", "model.safetensors.index.json"]
    assert asked[1] == sorted(file.name for file in tmp_path.glob("*.safetensors"))


def test_a_model_on_the_hub_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    files = ["config.json", "pytorch_model.bin"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *a, **k: files)
    with pytest.raises(CheckpointError, match=r"'someone/old' has no weights .*only pytorch_model\.bin"):
        resolve_checkpoint("someone/old")


def resolve_on_ranks(cache: str, name: str, apart: bool) -> tuple[str, bool, int]:
    """What a rank finds, and how often it asked the Hub rather than the cache."""
    import socket

    real, online = huggingface_hub.snapshot_download, []

    def download(*args: Any, local_files_only: bool, **options: Any) -> str:
        online.append(not local_files_only)
        return real(*args, local_files_only=True, **options)

    huggingface_hub.snapshot_download = download
    hostname = socket.gethostname
    if apart:
        socket.gethostname = lambda: f"machine{dist.get_rank()}"
    try:
        folder = resolve_checkpoint(name, cache_dir=cache)
        return folder.name, folder.is_dir(), sum(online)
    except CheckpointError as error:
        return str(error), False, sum(online)
    finally:
        huggingface_hub.snapshot_download = real
        socket.gethostname = hostname


def test_one_rank_per_machine_downloads(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    cached(tmp_path)
    together = ranks(2).run(resolve_on_ranks, str(tmp_path), "someone/tiny", False)
    assert together == [(COMMIT, True, 2), (COMMIT, True, 0)]
    apart = ranks(2).run(resolve_on_ranks, str(tmp_path), "someone/tiny", True)
    assert apart == [(COMMIT, True, 2), (COMMIT, True, 2)]


def test_all_ranks_fail_if_the_download_does(tmp_path: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    first, second = ranks(2).run(resolve_on_ranks, str(tmp_path), "someone/else", False)
    assert first[0] == second[0] and first[0].startswith("cannot find 'someone/else' on the Hub")
    assert second[2] == 0


# -- configuration and class ---------------------------------------------------------------------------------


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def test_config_and_class(tmp_path: Path) -> None:
    save(tiny_model("GPT2LMHeadModel"), tmp_path)
    config, cls, unused = load_config_and_class(tmp_path, {"n_layer": 1, "no_such_option": 3})
    assert cls is transformers.GPT2LMHeadModel and config.n_layer == 1
    assert unused == {"no_such_option": 3}


def test_configs_without_a_usable_class(tmp_path: Path) -> None:
    save(tiny_model("GPT2LMHeadModel"), tmp_path)
    rewrite(tmp_path, architectures=["NoSuchModel"])
    with pytest.raises(CheckpointError, match=f"'NoSuchModel', which transformers {transformers.__version__}"):
        load_config_and_class(tmp_path, {})
    rewrite(tmp_path, architectures=None)
    with pytest.raises(CheckpointError, match=r'config\.json does not say .*"architectures": .*gpt2'):
        load_config_and_class(tmp_path, {})
    rewrite(tmp_path, model_type="no_such_type")
    with pytest.raises(CheckpointError, match="cannot read the configuration"):
        load_config_and_class(tmp_path, {})


def test_transformers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_transformers_version()
    monkeypatch.setattr("transformers.__version__", "5.16.3")
    message = "Found version 5.16.3, but Paraxis needs at least 5.17.0."
    with pytest.raises(ImportError, match=f"incompatible version of transformers. {message}"):
        check_transformers_version()
