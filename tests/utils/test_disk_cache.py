"""The cache of small files on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paraxis
from paraxis.utils import disk_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARAXIS_CACHE", str(tmp_path))
    return tmp_path


class Configured(nn.Module):
    """A module with a configuration, as transformers' models have one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = Settings(settings)


class Settings:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return {"_name_or_path": "/somewhere", **self.settings}


def test_data_is_read_as_it_was_written(folder: Path) -> None:
    disk_cache.write("plans", "key", {"a": [1, 2]})
    assert disk_cache.read("plans", "key") == {"a": [1, 2]}
    assert [path.name for path in (folder / "plans").iterdir()] == ["key.json"]


def test_missing_and_corrupt_files_are_cache_misses(folder: Path) -> None:
    assert disk_cache.read("plans", "key") is None and disk_cache.read("plans", None) is None
    disk_cache.write("plans", "key", 1)
    (folder / "plans" / "key.json").write_text("{")
    assert disk_cache.read("plans", "key") is None


def test_an_empty_variable_disables_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAXIS_CACHE", "")
    disk_cache.write("plans", "key", 1)
    assert disk_cache.directory("plans") is None and disk_cache.read("plans", "key") is None


def test_the_folder_is_that_of_the_variable_or_the_users_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert disk_cache.directory("plans") == folder / "plans"
    monkeypatch.delenv("PARAXIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert disk_cache.directory("plans") == folder / "paraxis" / "plans"


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    (folder / "plans").write_text("a file")
    disk_cache.write("plans", "key", 1)
    assert disk_cache.read("plans", "key") is None


def test_the_least_recently_used_files_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_FILES", 2)
    for age, name in enumerate(("c", "b", "a")):
        disk_cache.write("plans", name, 1)
        os.utime(folder / "plans" / f"{name}.json", (100 + age, 100 + age))
    disk_cache.read("plans", "b")  # a cache hit makes it the most recently used
    disk_cache.write("plans", "d", 1)
    assert {path.stem for path in (folder / "plans").iterdir()} == {"b", "d"}


def test_keys_follow_the_configuration_and_the_other_data() -> None:
    keys = {
        disk_cache.key_of(Configured(layers=2), ranks=2),
        disk_cache.key_of(Configured(layers=3), ranks=2),
        disk_cache.key_of(Configured(layers=2), ranks=4),
        disk_cache.key_of(Configured(layers=2), ranks=2, code=False),
    }
    assert len(keys) == 4 and None not in keys
    assert disk_cache.key_of(Configured(layers=2), ranks=2) in keys


def test_a_module_without_configuration_has_no_key() -> None:
    assert disk_cache.key_of(nn.Linear(2, 2)) is None


def test_every_file_of_the_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit anywhere in the package invalidates what its old code cached."""
    seen: list[Path] = []
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: seen.append(self) or rglob(self, pattern))
    disk_cache._package.__wrapped__()
    assert seen == [Path(str(paraxis.__file__)).parent]
