"""A model that does not fit is refused with the figures, before anything is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from paraxis.cli._fits import (
    available_memory,
    check_disk,
    check_fits,
    container_limits,
    local_ranks,
    most_layers,
    parameter_count,
)

PARAXIS = [sys.executable, "-c", "from paraxis.cli import main; main()"]


def claiming(folder: Path, bytes_per_layer: int, layers: int) -> str:
    """A configuration whose MLPs have so many bytes in float32, with nothing else of any size."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=96,
        num_hidden_layers=layers,
        intermediate_size=bytes_per_layer // (4 * 3 * 32),
    )
    config.save_pretrained(folder)
    return str(folder)


def verify(*args: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PARAXIS, "verify", *args], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    )


def test_a_model_larger_than_the_memory_is_refused(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two ranks hold each layer three times: one of an eighth of the memory fits twice, and 50 do not."""
    memory = available_memory()
    assert memory is not None
    model = claiming(tmp_path_factory.mktemp("model"), memory // 8, 50)
    started = time.monotonic()
    found = verify(model, "--tp", "2", temporary=tmp_path)
    assert found.returncode == 1 and not found.stdout, found.stderr
    billions = f"{parameter_count(model) / 1e9:.3g} billion parameters"
    assert (
        f"the model does not fit: it has {billions}" in found.stderr and "are available on this machine" in found.stderr
    )
    assert (
        "GB for 2 copies of the unsharded model, one per rank" in found.stderr and "GB for the shards" in found.stderr
    )
    assert "--layers 2 fits" in found.stderr or "--layers 1 fits" in found.stderr  # others use memory meanwhile
    assert not any(tmp_path.iterdir()) and time.monotonic() - started < 60


def test_the_parts_are_added_and_unknown_memory_passes() -> None:
    def needed(parameters: int) -> dict[str, float]:
        return {"for weights": 4e9 * parameters, "for nothing": 0}

    def count(layers: int | None) -> int:
        return 2 + 3 * (10 if layers is None else layers)

    check_fits(count, None, needed, None, "here")
    check_fits(count, 2, needed, int(32e9), "here")
    with pytest.raises(
        ValueError, match=r"needs 128 GB \(128 GB for weights\), but 40 GB are available here: --layers 2"
    ):
        check_fits(count, None, needed, int(40e9), "here")
    with pytest.raises(ValueError, match="use a machine with more memory"):
        check_fits(count, None, needed, int(10e9), "here")


def test_models_whose_layers_cannot_be_set() -> None:
    assert most_layers(lambda n: 100, 100, lambda n: n < 50) == 0

    def refuses(layers: int | None) -> int:
        raise TypeError("num_hidden_layers")

    assert most_layers(refuses, 100, lambda n: True) == 0


def test_parameters_are_counted_without_weights(folder: str) -> None:
    data = json.loads(Path(folder, "config.json").read_text())
    embeddings = 2 * data["vocab_size"] * data["hidden_size"]
    one, three = parameter_count(folder), parameter_count(folder, 3)
    assert three - data["hidden_size"] - embeddings == 3 * (one - data["hidden_size"] - embeddings)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(version: int, tmp_path: Path) -> None:
    """Also that of an outer group; files in the page cache are free."""
    root = tmp_path / "cgroup"
    inner = (root if version == 2 else root / "memory") / "job" / "step"
    inner.mkdir(parents=True)
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    (inner / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    for folder, values in ((inner, (None, 10)), (inner.parent, (1000, 400))):
        (folder / used).write_text(f"{values[1]}\n")
        (folder / "memory.stat").write_text(f"{prefix}active_file 30\n{prefix}inactive_file 70\nanon 1\n")
        if values[0] is not None:
            (folder / limit).write_text(f"{values[0]}\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n3:cpu:/other\n")
    assert min(container_limits(own, root)) == 1000 - 400 + 100
    assert container_limits(tmp_path / "none", root) == []


def test_random_weights_need_a_disk(tmp_path: Path) -> None:
    check_disk(str(tmp_path), 1)
    with pytest.raises(ValueError, match="the random weights need 1e.09 GB in .* set TMPDIR"):
        check_disk(str(tmp_path), 10**18)


def test_only_the_ranks_of_this_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks(8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_ranks(8) == 4
