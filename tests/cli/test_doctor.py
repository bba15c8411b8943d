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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with GPUs")
def test_without_a_gpu_the_lines_say_so() -> None:
    found = {finding.what: finding for finding in doctor.devices()}
    for name in ("NCCL", "GPU peer access", "symmetric memory"):
        assert found[name].found == "not checked: no GPU" and found[name].verdict == doctor.UNCHECKED
        assert found[name].advice.startswith("for ")


def test_what_connects_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that torch claims: each check says what it found, and what a failure means."""

    def launch(_: int, fn: Any, *args: Any) -> Any:
        if fn is doctor._map_memory:
            raise RuntimeError("rank 0 failed:\nno NVLink")
        return [3, 3]

    monkeypatch.setattr(doctor, "launch", launch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    assert doctor.nccl(2).found == "2.28.9, all-reduce between 2 GPUs works"
    assert doctor.nccl(1).found == "2.28.9 available; not tested: one GPU"
    peers, symmetric = doctor.peer_access(2), doctor.symmetric_memory(2)
    assert peers.verdict == doctor.WARNING and peers.found == "missing: 0 of 1 pairs have it"
    assert symmetric.verdict == doctor.WARNING and symmetric.found == "missing: no NVLink"
    assert doctor.peer_access(1).verdict == doctor.symmetric_memory(1).verdict == doctor.UNCHECKED
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert doctor.nccl(2).verdict == doctor.BAD and "install a torch build with NCCL" in doctor.nccl(2).advice
