"""The names of a checkpoint's files: what an index or a configuration names stays inside of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import batch, context, max_difference, reference
from weights.tiny_models import save, tiny_model

from paraxis import parallelize_model
from paraxis.errors import CheckpointError
from paraxis.weights.file_names import INDEX_NAME, check_name, read_index
from paraxis.weights.hub import resolve_checkpoint
from paraxis.weights.weight_map import collect_weight_map


def leading_out(folder: Path, how: str) -> str:
    """Move a file of a checkpoint out of its folder, and let the index name it there. Returns the entry."""
    index = folder / INDEX_NAME
    data = json.loads(index.read_text())
    moved = sorted(set(data["weight_map"].values()))[0]
    outside = folder.parent / moved
    (folder / moved).rename(outside)
    entry = {"up": f"../{moved}", "through": f"sub/../../{moved}", "absolute": str(outside)}[how]
    data["weight_map"] = {key: entry if file == moved else file for key, file in data["weight_map"].items()}
    index.write_text(json.dumps(data))
    (folder / "sub").mkdir()
    assert (folder / entry).is_file(), "there is such a file"
    return entry


@pytest.mark.parametrize("how", ["up", "through", "absolute"])
def test_an_index_cannot_name_files_outside_of_its_folder(tmp_path: Path, how: str) -> None:
    folder = save(tiny_model("LlamaForCausalLM"), tmp_path / "model", 4)
    entry = leading_out(folder, how)
    with pytest.raises(CheckpointError) as caught:
        collect_weight_map(folder)
    message = str(caught.value)
    assert str(folder / INDEX_NAME) in message and repr(entry) in message and "into the folder" in message
    assert "the entry 'model." in message or "the entry 'lm_head." in message


def test_a_downloaded_index_is_checked_before_anything_is_fetched_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny_model("LlamaForCausalLM"), tmp_path / "model", 4)
    leading_out(folder, "up")
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match="not the name of a file in the checkpoint's folder"):
        resolve_checkpoint("someone/tiny")
    assert len(asked) == 1


def test_links_inside_of_the_folder_are_followed(tmp_path: Path) -> None:
    """The Hub's cache: every file of a snapshot is a link to ``../../blobs``."""
    folder = save(tiny_model("LlamaForCausalLM"), tmp_path / "repo" / "snapshots" / "main", 4)
    blobs = tmp_path / "repo" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../../blobs") / str(number))
    assert len(set(collect_weight_map(folder).values())) > 1


@pytest.mark.parametrize("name", ["a.safetensors", "sub/a.safetensors", "a..b.safetensors", ".hidden.safetensors"])
def test_names_inside(name: str) -> None:
    check_name(name, Path("config.json"), "an entry")


@pytest.mark.parametrize("name", ["..", "/a", "a/../b", "..\\a", "C:\\a", "C:a", "\\\\host\\share\\a", 3, None, ["a"]])
def test_names_that_lead_out(name: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json': an entry is "):
        check_name(name, Path("config.json"), "an entry")


def test_what_is_no_index(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"weight_map": 3}', "not json"):
        (tmp_path / INDEX_NAME).write_text(text)
        with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
            read_index(tmp_path / INDEX_NAME)


def load_inside_then_outside(inside: str, outside: str) -> tuple[float, str]:
    """The difference of a model whose index stays inside, and the error of one whose index does not."""
    model = parallelize_model(inside, context())
    ids, _ = batch(model.config.vocab_size)
    with torch.no_grad():
        difference = max_difference(model(input_ids=ids).logits, reference(inside)(input_ids=ids).logits)
    with pytest.raises(CheckpointError) as caught:
        parallelize_model(outside, context())
    return difference, str(caught.value)


def test_all_ranks_refuse_a_checkpoint_that_leads_out(tmp_path: Path, ranks: Any) -> None:
    inside, outside = (save(tiny_model("LlamaForCausalLM"), tmp_path / name, 4) for name in ("inside", "outside"))
    entry = leading_out(outside, "up")
    for difference, message in ranks(2).run(load_inside_then_outside, str(inside), str(outside)):
        assert difference < 1e-4
        assert repr(entry) in message
