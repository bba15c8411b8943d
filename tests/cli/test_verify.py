"""`paraxis verify`: the parallel model against the unsharded one."""

from __future__ import annotations

import json
from pathlib import Path

from cli.helpers import call


def test_random_weights(folder: str, tmp_path: Path) -> None:
    """From a configuration alone: random weights, one layer."""
    (tmp_path / "config.json").write_text(Path(folder, "config.json").read_text())
    found = call("verify", str(tmp_path), "--tp", "2", "--layers", "1", "--train", "--generate", "--json")
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and data["agreed"] and data["weights"] == "random weights, 1 layers"
    assert data["world_size"] == len(data["checks"]) == 2 and data["sharded_fraction"] < 0.55
    names = [check["name"] for check in data["checks"][0]]
    assert names == ["logits (max abs)", "loss (abs)", "gradients (relative)", "tokens (differing)"]
