"""Checkpoints that are broken, and ranks that do not see the same one: an error on all ranks, and none hangs."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import batch, parallel
from models.tiny import build, save
from safetensors.torch import load_file, save_file

from paraxis import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def messages(folders: list[list[str]]) -> list[str]:
    """What a rank is told about each of these, which may be another folder for each rank."""
    found = []
    for folder in folders:
        try:
            parallel(folder[dist.get_rank() % len(folder)])
            found.append("")
        except CheckpointError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save("gpt2", tmp_path_factory.mktemp("good")))


def copy(folder: Path, target: Path, **changes: Any) -> str:
    """A copy with other tensors; None leaves one out."""
    shutil.copytree(folder, target)
    tensors = {**load_file(folder / SINGLE), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, target / SINGLE, metadata={"format": "pt"})
    return str(target)


def test_broken_checkpoints(ranks: Any, folder: Path, tmp_path: Path) -> None:
    cut, noise, index = (Path(copy(folder, tmp_path / name)) for name in ("cut", "noise", "index"))
    (cut / SINGLE).write_bytes((cut / SINGLE).read_bytes()[:-1000])
    (noise / SINGLE).write_bytes(b"\x07" * 5000)
    (index / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": "model-00002-of-00002.safetensors"}}))
    norm = "transformer.h.1.ln_1.weight"
    shape = copy(folder, tmp_path / "shape", **{norm: torch.ones(3)})
    missing = copy(folder, tmp_path / "missing", **{norm: None})
    unexpected = copy(folder, tmp_path / "unexpected", **{"transformer.h.7.ln_1.weight": torch.ones(3)})
    cases = [[str(cut)], [str(noise)], [str(index)], [shape], [missing], [unexpected]]
    first, second = ranks(2).run(messages, cases)
    assert first == second
    for text, expected in zip(
        first,
        (
            "not a readable safetensors file",
            "not a readable safetensors file",
            "model-00002-of-00002.safetensors",
            f"{norm}: shape (3,) in the checkpoint",
            f"{norm}: missing in the checkpoint",
        ),
        strict=False,
    ):
        assert expected in text
    assert first[-1] == "", "tensors that the model does not have are left alone, as by transformers"


def test_ranks_that_see_different_files(ranks: Any, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = {name: tensor + 0.01 for name, tensor in load_file(folder / SINGLE).items()}
    other = copy(folder, tmp_path / "other", **trained)
    config = Path(copy(folder, tmp_path / "config"))
    (config / "config.json").write_text((config / "config.json").read_text() + " ")
    same = copy(folder, tmp_path / "same")
    found = ranks(2).run(messages, [[str(folder), other], [str(folder), str(config)], [str(folder), same]])
    assert found[0] == found[1]
    assert "different checkpoints: model.safetensors of rank 1 is not what rank 0 has" in found[0][0]
    assert "config.json of rank 1" in found[0][1] and found[0][2] == ""


def warned(folder: str, **options: Any) -> tuple[list[str], torch.Tensor]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = parallel(folder, **options)
    ids, _ = batch(model.config.vocab_size)
    with torch.no_grad():
        return [str(w.message) for w in caught], model(input_ids=ids).logits


def test_a_new_head_is_initialized_and_named(ranks: Any, tmp_path: Path) -> None:
    """A checkpoint of the base model in a model with a head."""
    whole = build("llama")
    whole.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    (first, logits), (second, others) = ranks(2).run(warned, str(tmp_path))
    assert any("lm_head.weight is not in it and will be initialized" in text for text in first)
    assert not any("lm_head" in text for text in second), "said once"
    assert torch.equal(logits, others) and bool(logits.isfinite().all()) and logits.std() > 0


def test_nan_is_found_when_asked_for(ranks: Any, folder: Path, tmp_path: Path) -> None:
    norm = "transformer.h.1.ln_1.weight"
    broken = load_file(folder / SINGLE)[norm]
    broken[3] = float("nan")
    bad = copy(folder, tmp_path / "nan", **{norm: broken})
    first, _ = ranks(2).run(warned, bad, check_finite=True)[0]
    assert any(f"NaN or infinity in the weights of {norm}" in text for text in first)
    silent, _ = ranks(2).run(warned, bad)[0]
    assert not any("NaN" in text for text in silent)
