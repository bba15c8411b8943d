"""Models from a Hub on loopback, with the real client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weights.homemade import save_homemade
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


def add_variants(folder: Path) -> None:
    """A model in a subfolder, with other weights as a variant."""
    inner = save(tiny_model("GPT2LMHeadModel", num_hidden_layers=1), folder / "inner" / "model")
    tensors = {name: tensor * 1.5 for name, tensor in load_file(inner / "model.safetensors").items()}
    save_file(tensors, inner / "model.big.safetensors", metadata={"format": "pt"})


def loaded(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Logits by the name of the case, or the error; on one rank those of transformers, too. ``model`` is its name."""
    import torch.distributed as dist
    from models.compare import context
    from transformers import AutoModelForCausalLM

    from paraxis import parallelize_model
    from paraxis.errors import CheckpointError

    ids, found = torch.arange(3, 11)[None], {}
    for case, options in cases.items():
        name, options = options["model"], {key: value for key, value in options.items() if key != "model"}
        inputs = {"example_inputs": {"input_ids": ids}} if "trust_remote_code" in options else {}
        try:
            model = parallelize_model(name, context(), show_progress=False, **options, **inputs)
        except CheckpointError as error:
            found[case] = str(error)
            continue
        with torch.no_grad():
            found[case] = model(input_ids=ids).logits
            if dist.get_rank() == 0:
                right = AutoModelForCausalLM.from_pretrained(name, **options).eval()
                found[f"{case} of transformers"] = right(input_ids=ids).logits
    return found


def test_arguments_choose_what_is_loaded_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """``revision``, ``token``, ``subfolder`` and ``variant``, as in ``from_pretrained`` and all together; and code that
    comes with a model, which is fetched and run with ``trust_remote_code`` alone."""
    for folder in hub.repos["someone/gated"].values():
        add_variants(folder)
    hub.repos["someone/gated"]["v1"] = save(tiny_model("GPT2LMHeadModel", num_hidden_layers=1), tmp_path / "v1")
    hub.repos["someone/homemade"] = {"main": save_homemade(tmp_path / "hub" / "homemade")}
    gated = {"model": "someone/gated", "token": TOKEN}
    inner = {**gated, "subfolder": "inner/model"}
    code = {"model": "someone/homemade"}
    cases: dict[str, dict[str, Any]] = {
        "plain": gated,
        "revision": {**gated, "revision": "v1"},
        "subfolder": inner,
        "variant": {**inner, "variant": "big"},
        "code": {**code, "trust_remote_code": True},
    }
    refused = {
        "no trust": code,
        "no token": {"model": "someone/gated", "subfolder": "inner/model"},
        "no variant": {**inner, "variant": "small"},
        "no subfolder": {**gated, "subfolder": "absent"},
    }
    outcomes = spawn_ranks(2, loaded, {**refused, **cases}, timeout=600)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    first, second = (outcome.value for outcome in outcomes)
    for case in cases:
        right = first[f"{case} of transformers"]
        assert torch.equal(first[case], second[case]) and (first[case] - right).abs().max() < 1e-4, case
    assert (first["variant"] - first["subfolder"]).abs().max() > 1e-2, "other weights"
    assert (first["revision"] - first["plain"]).abs().max() > 1e-2
    for case in refused:
        assert isinstance(first[case], str) and first[case] == second[case], case
    assert "trust_remote_code=True" in first["no trust"] and "homemade.HomemadeConfig" in first["no trust"]
    assert "gated" in first["no token"] and "absent" in first["no subfolder"], first
    assert "model.small.safetensors" in first["no variant"] and "model.big.safetensors" in first["no variant"]
