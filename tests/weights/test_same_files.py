"""Ranks that see different files of a checkpoint fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models.tiny import save
from safetensors.torch import load_file
from weights.checkpoints import SINGLE, copy, errors_of

from paraxis.weights.same_files import SAMPLE_BYTES, SAMPLES, fingerprint


def test_other_weights_and_other_configurations_are_found(ranks: Any, tmp_path: Path) -> None:
    folder = Path(save("gpt2", tmp_path / "good"))
    torch.manual_seed(1)
    trained = {name: tensor + 0.01 for name, tensor in load_file(folder / SINGLE).items()}
    other = copy(folder, tmp_path / "other", **trained)
    config = Path(copy(folder, tmp_path / "config"))
    (config / "config.json").write_text((config / "config.json").read_text() + " ")
    same = copy(folder, tmp_path / "same")
    found = ranks(2).run(errors_of, [[str(folder), other], [str(folder), str(config)], [str(folder), same]])
    assert found[0] == found[1]
    assert "different checkpoints: model.safetensors of rank 1 is not what rank 0 has" in found[0][0]
    assert "config.json of rank 1" in found[0][1] and found[0][2] == ""


def test_fingerprints_sample_the_file(tmp_path: Path) -> None:
    """Its size, its beginning and its end count, and samples in between."""
    file = tmp_path / "file"
    content = bytearray(2 * SAMPLES * SAMPLE_BYTES)
    found = set()
    for change in (None, 0, len(content) - 1, len(content) // 2):
        changed = bytearray(content)
        if change is not None:
            changed[change] = 1
        file.write_bytes(changed)
        found.add(fingerprint(file))
    file.write_bytes(content + b"\0")
    assert len(found | {fingerprint(file)}) == 5
    file.write_bytes(b"")
    assert fingerprint(file)
