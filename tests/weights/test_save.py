"""Checkpoints written by all ranks: what transformers writes, completely or not at all."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import save
from safetensors import safe_open
from zoo.cases import find

from paraxis.weights.save import Group, assign_files
from ranks import spawn_ranks


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as its index, or its one file, has them."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    found = {}
    for name in files:
        with safe_open(folder / name, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- not a dictionary
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def saved(folder: str, target: str, size: int | str) -> list[str]:
    """Save twice, the second time over the first; what is in the directory then."""
    from models.compare import parallel

    model, _ = parallel(folder)
    model.save_pretrained(target, max_shard_size="1GB")
    model.save_pretrained(target, max_shard_size=size)
    return sorted(path.name for path in Path(target).iterdir())


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])  # experts stored one by one; tied, transposed and packed weights
def test_checkpoints_are_those_of_transformers(ranks: Any, tmp_path: Path, name: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    find(name).make().save_pretrained(source)
    size = sum(t.numel() * t.itemsize for t in stored(source).values())
    found = ranks(2).run(saved, str(source), str(target), size // 3)[0]
    assert same(stored(source), stored(target))
    weights = [name for name in found if name.endswith(".safetensors")]
    assert len(weights) >= 3 and not any(name.startswith(".") for name in found)
    assert "model.safetensors" not in found, "the previous checkpoint is removed"
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} < set(found)


def too_large(folder: str, target: str) -> None:
    """Rank 0 can write small files only, as on a full disk."""
    import torch.distributed as dist
    from models.compare import parallel

    model, _ = parallel(folder)
    model.save_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    model.save_pretrained(target, max_shard_size=15_000)


def test_a_full_disk(tmp_path: Path) -> None:
    """After some files all ranks fail, and the checkpoint that was there is still the one before."""
    source, target = Path(save("llama", tmp_path / "source")), tmp_path / "target"
    for outcome in spawn_ranks(2, too_large, str(source), str(target), timeout=120):
        assert outcome.error == "CheckpointError"
        assert "could not write model" in outcome.message and "too large" in outcome.message
    assert same(stored(source), stored(target))
    assert not [path for path in target.iterdir() if path.name.startswith(".saving")]


def test_files_are_assigned_by_size() -> None:
    groups = [Group([f"w{i}"], {f"w{i}": torch.empty(10, device="meta")}) for i in range(5)]
    assert assign_files(groups, 1000) == {"model.safetensors": ["w0", "w1", "w2", "w3", "w4"]}
    assert [len(names) for names in assign_files(groups, 90).values()] == [2, 2, 1]
