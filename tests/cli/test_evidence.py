"""--report: what was run, on what, and the figures."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from paraxis.cli._errors import UsageError
from paraxis.cli._evidence import check_report, write_report

FIGURES = {
    "agreed": True,
    "collectives": {"all_reduce": 4},
    "checks": [{"rank": 0, "name": "a|b", "error": 1.23456e-7}],
}


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paraxis", "verify", "my model", "--tp", "2"])


def test_json_has_environment_and_figures(tmp_path: Path, typed: None) -> None:
    file = tmp_path / "report.json"
    write_report(file, "Compared", FIGURES)
    data = json.loads(file.read_text())
    assert data["figures"] == FIGURES and data["command"] == "paraxis verify 'my model' --tp 2"
    assert data["versions"]["torch"] == torch.__version__
    assert {"date", "machine", "gpus"} <= set(data) and data["machine"]["cores"]
    assert socket.gethostname() not in file.read_text()


def test_markdown_has_the_same_as_tables(tmp_path: Path, typed: None) -> None:
    file = tmp_path / "report.md"
    write_report(file, "Compared", FIGURES)
    text = file.read_text()
    assert text.startswith("# Compared\n") and "    paraxis verify 'my model' --tp 2" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert f"| versions torch | {torch.__version__} |" in rows
    assert {"| agreed | yes |", "| collectives all_reduce | 4 |", "| 0 | a\\|b | 1.235e-07 |"} <= set(rows)


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    check_report(None)
    check_report(tmp_path / "a.md")
    with pytest.raises(UsageError, match="name it .json or .md"):
        check_report(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="does not exist"):
        check_report(tmp_path / "none" / "a.md")
