"""``paraxis.init``: the context of torchrun's ranks, of one rank without it, and the end of a program that uses it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import reference

import paraxis
from paraxis.initialize import _device, _launched_rank, _Rank

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""What launchers set."""

SECONDS = 120.0


def start(world: int | None, code: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Run code on ranks that a launcher would have started; None: without a launcher."""
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [{}] if world is None else [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]
    common = {} if world is None else {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    address = {} if world is None else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**plain, **common, **address, **rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each rank; none may hang."""
    return [(process.wait(), output) for process in processes for output in [process.communicate(timeout=SECONDS)[0]]]


# -- a program ----------------------------------------------------------------------------------------------------

README = """
import sys, paraxis, torch
ctx = paraxis.init()
model = paraxis.parallelize_model(sys.argv[1], ctx)
tokens = model.generate(torch.tensor([[5, 6, 7, 8]], device=ctx.current_device), max_new_tokens=6, do_sample=False)
sys.stdout.write(f"{ctx.world_size} {ctx.current_device} {tokens.tolist()}\\n")  # one write: ranks share the pipe
"""


def test_a_script_of_three_lines_with_and_without_torchrun(checkpoints: Any, tmp_path: Path) -> None:
    folder = checkpoints("llama")
    script = tmp_path / "script.py"
    script.write_text(README)
    alone = start(None, README, folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launched = subprocess.run(
        [*torchrun, str(script), folder], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    right = reference(folder).generate(ids, max_new_tokens=6, do_sample=False).tolist()
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.splitlines() == [f"2 cpu {right}"] * 2
    ((code, output),) = finish(alone)
    assert code == 0 and output.splitlines()[-1] == f"1 cpu {right}", output


# -- the end of a program -----------------------------------------------------------------------------------------

ENDING = """
import atexit, sys
atexit.register(lambda: print("still initialized:", dist.is_initialized()))  # runs after what is registered later
import torch, paraxis, torch.distributed as dist
ctx = paraxis.init(timeout=60)
x = torch.ones(4)
dist.all_reduce(x)
if ctx.rank == 0:
    raise ValueError("on this rank")
if ctx.rank == 1:
    sys.exit(3)
if ctx.rank == 2:
    raise KeyboardInterrupt
dist.all_reduce(x)  # the others have left
"""


def test_exit_codes_are_right_and_no_rank_hangs() -> None:
    """Ranks that leave have their own exit codes, the last one fails as its collective does; no group is left."""
    outcomes = finish(start(4, ENDING))
    assert [code for code, _ in outcomes] == [1, 3, -2, 1], outcomes
    for _, output in outcomes:
        assert "still initialized: False" in output and "terminate called" not in output, outcomes


# -- the context --------------------------------------------------------------------------------------------------


def contexts() -> dict[str, Any]:
    """Contexts of a group that exists already, and what is refused."""
    plain, mesh, one = paraxis.init(seed=5), paraxis.init(dp=2), paraxis.init(tp=4, dp=1)
    drawn = torch.rand(1).item()
    errors = {}
    for name, options in {
        "dp": {"dp": 3},
        "tp": {"tp": 2},
        "zero": {"dp": 0},
        "backend": {"backend": "gloo"},
        "timeout": {"timeout": 3.0},
    }.items():
        with pytest.raises(ValueError) as caught:
            paraxis.init(**options)  # type: ignore[arg-type]
        errors[name] = str(caught.value)
    return {
        "group": plain.tp_group is dist.group.WORLD and plain.mesh is None,
        "device": (plain.current_device, mesh.current_device),
        "mesh": (mesh.rank, mesh.world_size, mesh.dp_rank, mesh.dp_size),
        "one": (one.world_size, one.dp_size, one.groups.dp is not None),
        "drawn": drawn,
        "errors": errors,
    }


def test_groups_that_exist_are_used(ranks: Any) -> None:
    pool = ranks(4)
    found = pool.run(contexts)
    for rank, each in enumerate(found):
        assert each["group"] and each["device"] == (torch.device("cpu"),) * 2
        assert each["mesh"] == (rank % 2, 2, rank // 2, 2) and each["one"] == (4, 1, True)
        assert each["drawn"] == found[0]["drawn"]
        errors = each["errors"]
        assert (
            "dp=3 does not fit 4 ranks" in errors["dp"] and "tp=2 × dp=1" in errors["tp"] and "dp=0" in errors["zero"]
        )
        assert "initialized already" in errors["backend"] and "initialized already" in errors["timeout"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher."""
    for name in (*LAUNCHER, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_environments_of_launchers(environment: pytest.MonkeyPatch) -> None:
    assert _launched_rank() == _Rank(0, 1, 0, 1, launched=False)
    environment.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="mpirun has started 4 processes.*torchrun"):
        _launched_rank()
    environment.setenv("RANK", "1")
    with pytest.raises(ValueError, match="has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: .*torchrun"):
        _launched_rank()
    for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        environment.setenv(name, value)
    assert _launched_rank() == _Rank(1, 4, None, None, launched=True)
    environment.setenv("LOCAL_RANK", "1")
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    assert _launched_rank() == _Rank(1, 4, 1, 2, launched=True)


@pytest.mark.parametrize(
    ("gpus", "place", "asked", "expected"),
    [
        (0, _Rank(1, 2, 1, 2, True), None, "cpu"),
        (2, _Rank(1, 2, 1, 2, True), None, "cuda:1"),
        (8, _Rank(9, 16, 1, 8, True), None, "cuda:1"),
        (8, _Rank(3, 4, None, None, True), None, "cuda:3"),
        (2, _Rank(0, 1, 0, 1, False), None, "cuda:0"),
        (2, _Rank(1, 2, 1, 2, True), "cpu", "cpu"),
        (1, _Rank(1, 2, 1, 2, True), "cuda:0", "cuda:0"),
        (1, _Rank(1, 2, 1, 2, True), None, "cpu"),
    ],
)
def test_devices_of_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: int, place: _Rank, asked: str | None, expected: str
) -> None:
    """A GPU for every rank of the machine, or none. Which GPU becomes the current one is noted instead of set."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    assert str(_device(asked, place)) == expected
    assert current == ([] if expected == "cpu" else [torch.device(expected)])


def test_too_few_gpus_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match="2 ranks on a machine with 1 GPUs"):
        assert _device(None, _Rank(0, 2, 0, 2, True)).type == "cpu"


def compare_types(types: list[str]) -> str:
    from datetime import timedelta

    from paraxis.compat.distributed import default_store
    from paraxis.initialize import _check_same_device_type

    rank = dist.get_rank()
    store = dist.PrefixStore(f"test/{'-'.join(types)}", default_store())
    try:
        _check_same_device_type(store, rank, 2, torch.device(types[rank]), timedelta(seconds=30))
    except ValueError as error:
        return str(error)
    return ""


def test_devices_of_different_types_are_refused_on_all_ranks(ranks: Any) -> None:
    assert ranks(2).run(compare_types, ["cpu", "cpu"]) == ["", ""]
    for message in ranks(2).run(compare_types, ["cuda", "cpu"]):
        assert "cuda on rank 0, cpu on rank 1" in message and "device=" in message
