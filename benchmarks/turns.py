"""Turns: all contenders are loaded at the same time, one of them works, the others sleep.

A machine's speed changes from minute to minute, often by more than the contenders differ. Running them one after the
other would compare minutes; many turns of a few seconds compare contenders.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from contenders import ALONE
from torch.distributed import TCPStore

TIMEOUT = timedelta(minutes=20)
PORT = "BENCH_PORT"
"""The environment variable with the port of the process that calls the turns."""


class Caller:
    """The side that starts contenders and calls their turns."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    @contextmanager
    def contender(self, name: str, folder: str, tp: int, part: str) -> Iterator[Contender]:
        """A contender in processes of its own, loaded, or with the error it ended with.

        Not started by torchrun, which would poll its ranks ten times a second during the turns of others.
        """
        command = [sys.executable, str(Path(__file__).parent / "measure.py"), name, folder, part]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", PORT: str(self.store.port)}
        if name not in ALONE:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(tp)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **quiet)
            for rank in range(1 if name in ALONE else tp)
        ]
        contender = Contender(self.store, f"{part}/{name}")
        try:
            contender.result = contender.answer()
            yield contender
        finally:
            contender.call("end")
            for process in ranks:
                if contender.failed:  # its other ranks may wait for one that has ended
                    process.kill()
                process.wait()


class Contender:
    """A running contender: its figures of loading, then of every turn."""

    def __init__(self, store: TCPStore, key: str) -> None:
        self.store, self.key, self.turns = store, key, 0
        self.result: dict[str, Any] = {}
        self.failed = False

    def turn(self) -> dict[str, Any]:
        """Let it take a turn; returns its figures."""
        self.call("go")
        return self.answer()

    def call(self, word: str) -> None:
        """Send a word: ``go`` or ``end``."""
        self.store.set(f"{self.key}/{self.turns}", word)
        self.turns += 1

    def answer(self) -> dict[str, Any]:
        """Wait for its figures or its error."""
        key = f"{self.key}/answer {self.turns}"
        self.store.wait([key], TIMEOUT)
        found = dict(json.loads(self.store.get(key)))
        self.failed = "error" in found
        return found


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Player:
    """The side of a contender: every rank waits for a turn, rank 0 answers, any rank reports an error."""

    def __init__(self, name: str, part: str) -> None:
        self.store = TCPStore("127.0.0.1", int(os.environ[PORT]), is_master=False, timeout=TIMEOUT)
        self.key, self.first, self.turns = f"{part}/{name}", os.environ["RANK"] == "0", 0

    def answer(self, found: dict[str, Any]) -> bool:
        """Report the figures and sleep until the next turn; False if there is none."""
        if self.first:
            self.say(found)
        word = self.store.get(f"{self.key}/{self.turns}")
        self.turns += 1
        return bool(word == b"go")

    def say(self, found: dict[str, Any]) -> None:
        """Send figures or an error."""
        self.store.set(f"{self.key}/answer {self.turns}", json.dumps(found))


def take_turns(names: list[str], folder: str, tp: int, part: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Of every contender its figures of loading and of each turn, or the error it ended with."""
    caller = Caller()
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as up:
        contenders = {name: up.enter_context(caller.contender(name, folder, tp, part)) for name in names}
        found = {name: [contender.result] for name, contender in contenders.items()}
        for _ in range(rounds):
            for name, contender in contenders.items():
                if "error" not in found[name][-1]:
                    found[name].append(contender.turn())
    return found
