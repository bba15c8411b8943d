"""The ranks of a service end together, with the right exit code."""

from __future__ import annotations

from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from serving.ends import end

from paraxis.serving import launch


def test_ranks_do_not_wait_for_one_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = SpawnProcess.start

    def failing(process: SpawnProcess) -> None:
        if started:
            raise OSError("no more processes")
        start(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", failing)
    with pytest.raises(OSError, match="no more processes"):
        launch.serve_ranks(2, end, ("error", str(tmp_path)), {})
    assert len(started) == 1 and not started[0].is_alive()


@pytest.mark.parametrize(("how", "code"), [("all", 0), ("signal", 0), ("killed", 1)])
def test_no_rank_is_left(how: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All end; one gets a signal, which the parent hands to it; one is killed, and the other one is, too."""
    monkeypatch.setattr(launch, "GRACE", 0.2 if how == "killed" else 60.0)
    assert launch.serve_ranks(2, end, (how, str(tmp_path)), {"OMP_NUM_THREADS": "1"}) == code
    for rank in (0, 1):
        pid, world = Path(tmp_path, f"{how}-{rank}").read_text().split()
        assert world == "2" and not Path(f"/proc/{pid}").exists()
