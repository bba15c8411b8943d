"""Models from a Hub on loopback, with the real client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weights.hub_server import TOKEN, Hub, commit_of
from weights.tiny_models import save, tiny_model

from ranks import spawn_ranks


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    folders = {name: tmp_path / "hub" / name for name in ("main", "small", "old")}
    for name, layers in (("main", 2), ("small", 1)):
        save(tiny_model("GPT2LMHeadModel", n_layer=layers), folders[name], 3)
        (folders[name] / "README.md").write_text("not needed")
        (folders[name] / "extra.safetensors").write_bytes(b"not in the index")
    folders["old"].mkdir()
    (folders["old"] / "config.json").write_text((folders["main"] / "config.json").read_text())
    (folders["old"] / "pytorch_model.bin").write_bytes(b"never read")
    server.repos = {
        "someone/tiny": {"main": folders["main"], "v1": folders["small"]},
        "someone/gated": {"main": folders["main"]},
        "someone/old": {"main": folders["old"]},
    }
    server.gated = {"someone/gated"}
    for name, value in (
        ("HF_ENDPOINT", server.url),
        ("HF_HOME", str(tmp_path / "home")),
        ("HF_HUB_OFFLINE", "0"),
        ("HF_HUB_DISABLE_XET", "1"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    yield server
    server.close()


Request = tuple[str, dict[str, Any]]


def resolved(requests: list[Request]) -> list[tuple[str, str | list[str]]]:
    """For each name: the folder's commit and its files, or the error. ``token`` is set from there on."""
    from paraxis.errors import CheckpointError
    from paraxis.weights.hub import resolve_checkpoint

    found: list[tuple[str, str | list[str]]] = []
    for name, options in requests:
        os.environ["HF_TOKEN"] = options.pop("token", os.environ.get("HF_TOKEN", ""))
        try:
            folder = resolve_checkpoint(name, **options)
            found.append((folder.name, sorted(path.name for path in folder.iterdir())))
        except CheckpointError as error:
            found.append(("error", str(error)))
    return found


def on_ranks(world: int, *requests: Request) -> list[Any]:
    """What the ranks found, which must be the same on all of them."""
    outcomes = spawn_ranks(world, resolved, list(requests))
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)
    return list(outcomes[0].value)


WEIGHTS = [f"model-0000{k}-of-00004.safetensors" for k in (1, 2, 3, 4)]
FILES = ["config.json", "generation_config.json", *WEIGHTS, "model.safetensors.index.json"]


def test_four_ranks_download_once_and_then_work_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files that are needed, each of them once."""
    expected = (commit_of("someone/tiny", "main"), FILES)
    assert on_ranks(4, ("someone/tiny", {})) == [expected]
    assert sorted(hub.downloads()) == FILES
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert on_ranks(1, ("someone/tiny", {}), ("someone/tiny", {"local_files_only": True})) == [expected] * 2
    assert not hub.log, "no request is sent"


def test_revisions_caches_tokens_and_errors(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    other, own, gated, missing, revision, old, authorized = on_ranks(
        2,
        ("someone/tiny", {"revision": "v1"}),
        ("someone/tiny", {"cache_dir": str(cache), "weights": False}),
        ("someone/gated", {}),
        ("someone/else", {}),
        ("someone/tiny", {"revision": "v9"}),
        ("someone/old", {}),
        ("someone/gated", {"token": TOKEN}),
    )
    assert other == (commit_of("someone/tiny", "v1"), FILES)
    assert own[1] == FILES[:2] and (cache / "models--someone--tiny").is_dir()
    assert gated[0] == "error" and "'someone/gated' is gated" in gated[1] and "HF_TOKEN" in gated[1]
    assert missing[0] == "error" and "there is no model 'someone/else' on the Hub" in missing[1]
    assert revision[0] == "error" and "'someone/tiny' has no revision 'v9'" in revision[1]
    assert old[0] == "error" and "has no weights" in old[1] and "only pytorch_model.bin" in old[1]
    assert authorized[1] == FILES
    assert "pytorch_model.bin" not in hub.downloads()


def test_an_interrupted_download_is_resumed(hub: Hub) -> None:
    """The connection breaks in one file, again and again: no rank has a model; later only that file is fetched."""
    hub.broken = {WEIGHTS[2]}
    ((kind, message),) = on_ranks(2, ("someone/tiny", {}))
    assert kind == "error" and "downloading 'someone/tiny' failed" in message
    hub.broken.clear()
    hub.log.clear()
    assert on_ranks(1, ("someone/tiny", {}))[0][1] == FILES
    assert WEIGHTS[2] in hub.downloads() and not {WEIGHTS[0], WEIGHTS[1]} & set(hub.downloads())
