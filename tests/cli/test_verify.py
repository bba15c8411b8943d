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


def test_low_precision_and_a_report(folder: str, tmp_path: Path) -> None:
    """The ranks and the code of --device cuda, on CPUs."""
    report = tmp_path / "report.json"
    options = ("--device", "cpu", "--dtype", "bfloat16", "--generate", "--report", str(report))
    found = call("verify", folder, "--tp", "2", *options)
    assert found.exit_code == 0, found.output
    assert (
        "2 ranks (cpu, gloo, bfloat16), random weights" in found.stdout
        and "matches the unsharded model" in found.stdout
    )
    data = json.loads(report.read_text())
    assert (
        data["figures"]["backend"] == "gloo"
        and data["figures"]["agreed"]
        and data["figures"]["devices"] == ["cpu", "cpu"]
    )
    checks = [(each["rank"], each["name"]) for each in data["figures"]["checks"]]
    assert checks == [(rank, name) for rank in (0, 1) for name in ("logits (rounding)", "tokens (logit gap)")]
