"""`paraxis doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from cli.helpers import call

from paraxis.cli import doctor


def test_this_machine() -> None:
    found = call("doctor", "--json")
    data = {finding["what"]: finding for finding in json.loads(found.stdout)}
    assert found.exit_code == 0
    assert torch.__version__.startswith(data["torch"]["found"])
    assert data["gloo, 2 ranks"]["found"] == "all-reduce works"
    assert all(finding["verdict"] != doctor.BAD for finding in data.values())


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("safetensors", "peft"):
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    bad = [finding for finding in doctor.packages() if finding.verdict == doctor.BAD]
    assert [(finding.what, finding.advice) for finding in bad] == [("safetensors", "pip install safetensors")]


def test_ranks_that_cannot_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> Any:
        raise RuntimeError("rank 0 failed:\nno route to host")

    monkeypatch.setattr(doctor, "launch", launch)
    finding = doctor.communication()
    assert finding.verdict == doctor.BAD and finding.found == "failed: no route to host"
    assert "GLOO_SOCKET_IFNAME" in finding.advice
