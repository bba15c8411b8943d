"""--device: GPUs that are not there are refused in one sentence, before anything starts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cli.helpers import call

from paraxis.cli._devices import choose_device, ranks_per_gpu
from paraxis.cli._errors import UsageError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let torch claim a number of GPUs, and a build with CUDA and NCCL."""

    def claim(count: int, cuda: str | None = "13.0", nccl: bool = True) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return claim


def test_gpus_are_used_if_there_is_one_for_each_rank(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(4)
    assert choose_device("cuda", 4) == choose_device("auto", 4) == "cuda"
    assert choose_device("auto", 8) == choose_device("cpu", 4) == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # torchrun on two machines
    assert choose_device("cuda", 8) == "cuda"


@pytest.mark.parametrize(
    ("count", "options", "text"),
    [
        (0, {"cuda": None}, "is built without CUDA: install a build with it, or use --device cpu"),
        (0, {}, "torch finds no GPU on this machine: check the driver"),
        (1, {}, "4 ranks need 4 GPUs, because NCCL cannot share one between ranks, and torch finds 1 GPU"),
        (3, {}, "torch finds 3 GPUs on this machine: use --tp 3, or several machines with torchrun"),
        (4, {"nccl": False}, "is built without NCCL"),
    ],
)
def test_what_is_missing(
    gpus: Any, count: int, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus(count, **options)
    with pytest.raises(ValueError, match=text):
        choose_device("cuda", 4)


def test_an_unknown_device() -> None:
    with pytest.raises(UsageError, match="--device 'tpu' is none of cpu, cuda and auto"):
        choose_device("tpu", 2)


def test_ranks_share_gpus_where_that_is_allowed(gpus: Any) -> None:
    """Over gloo: results are right, times mean nothing."""
    gpus(2)
    assert choose_device("cuda", 4, share=True) == "cuda" and choose_device("auto", 4, share=True) == "cpu"
    assert [ranks_per_gpu(tp) for tp in (1, 2, 4, 5)] == [1, 1, 2, 3]
    gpus(0)
    with pytest.raises(ValueError, match="torch finds no GPU"):
        choose_device("cuda", 4, share=True)


@pytest.mark.parametrize(("command", "count"), [("verify", 0), ("bench", 0), ("bench", 1)])
def test_commands_refuse_before_anything_starts(
    command: str, count: int, folder: str, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(count)
    monkeypatch.setattr("paraxis.cli.verify.launch", None)
    monkeypatch.setattr("paraxis.cli.bench.launch", None)
    started = time.monotonic()
    found = call(command, folder, "--tp", "2", "--device", "cuda")
    assert found.exit_code == 1 and not found.stdout and time.monotonic() - started < 10
    text = "2 ranks need 2 GPUs" if count else "torch finds no GPU on this machine"
    assert found.stderr.startswith(f"paraxis: --device cuda: {text}") and found.stderr.count("\n") == 1
