"""`paraxis bench`: two ranks and the unsharded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.helpers import call

from paraxis.cli._fits import parameter_count
from paraxis.cli.bench import Figures, Task, check_memory, show


def test_ranks_and_the_unsharded_model_are_measured(folder: str, tmp_path: Path) -> None:
    """From a configuration alone, a few tokens; the former names of the options still work."""
    report = tmp_path / "report.json"
    sizes = ("--layers", "1", "--prompt", "8", "--output-len", "3")
    found = call("bench", folder, "--tp", "2", *sizes, "--device", "cpu", "--report", str(report), "--json")
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and data["weights"] == "random weights, 1 layers" and data["input_len"] == 8
    assert "warning: --prompt is deprecated" in found.stderr and found.stderr.strip().endswith("use --input-len")
    ours, unsharded = data["parallel"], data["unsharded"]
    keys = ("load", "first_prefill", "prefill", "decode", "peak_memory")
    assert all(each[key] > 0 for each in (ours, unsharded) for key in keys)
    assert ours["parameters"] < 0.55 * unsharded["parameters"] and ours["collectives"] == 4 and ours["plan"] > 0
    assert ours["training_step"] is None and unsharded["collectives"] == 0
    assert (
        json.loads(report.read_text())["figures"] == {"model": folder, "backend": "gloo", **data}
        and data["device"] == "cpu"
    )


def test_a_model_that_does_not_fit_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype it is measured in; without the unsharded model, ranks on other machines do not count."""
    monkeypatch.setattr("paraxis.cli.bench.RESERVED_PER_RANK", 0)
    size = 2 * parameter_count(folder)
    for available, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr("paraxis.cli.bench.available_memory", lambda available=available: available)
        if fits:
            check_memory(folder, None, 4, "cpu", "bfloat16", baseline=True)
        else:
            with pytest.raises(ValueError, match="the model does not fit"):
                check_memory(folder, None, 4, "cpu", "bfloat16", baseline=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(folder, None, 4, "cpu", "bfloat16", baseline=False)


def test_the_table_shows_the_slowest_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest rank counts."""
    task = Task("", 8, 3, 1, "auto", False, True)
    ranks = [Figures(1.0, 0.5, 0.2, 0.01 * n, 0.001, 0.02, 100, 1000, 4) for n in (1, 2)]
    show(ranks, Figures(2.0, 0.0, 0.1, 0.04, 0.003, 0.06, 200, 2000, 0), task, "random weights", 2, as_json=False)
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "20.0 ms" in rows["prefill (TTFT)"] and "2.00×" in rows["prefill (TTFT)"]
    assert "3.00×" in rows["decode (time per output token)"] and "training step" in rows
