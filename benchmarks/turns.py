"""Taking turns: all contenders are up at once, one of them works, the others sleep.

A machine's speed changes from minute to minute, often by more than the contenders differ. Figures from processes that
ran one after the other would compare minutes; those of turns a few seconds long, over and over, compare contenders.
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

PATIENCE = timedelta(minutes=20)
PORT = "BENCH_PORT"
"""Where ranks find the port of the one who calls the turns."""


class Caller:
    """The side that starts contenders and calls their turns."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)

    @contextmanager
    def contender(self, name: str, folder: str, tp: int, part: str) -> Iterator[Contender]:
        """A contender in processes of its own, ready for its turns or with the error that it ended with.

        Started here and not by torch's launcher, which would look after its ranks ten times a second during the turns
        of others.
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
                if contender.failed:  # its other ranks may wait for one that is gone
                    process.kill()
                process.wait()


class Contender:
    """One that is up: what it found while it came up, and then turn by turn."""

    def __init__(self, store: TCPStore, key: str) -> None:
        self.store, self.key, self.turns = store, key, 0
        self.result: dict[str, Any] = {}
        self.failed = False

    def turn(self) -> dict[str, Any]:
        self.call("go")
        return self.answer()

    def call(self, word: str) -> None:
        self.store.set(f"{self.key}/{self.turns}", word)
        self.turns += 1

    def answer(self) -> dict[str, Any]:
        key = f"{self.key}/answer {self.turns}"
        self.store.wait([key], PATIENCE)
        found = dict(json.loads(self.store.get(key)))
        self.failed = "error" in found
        return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Player:
    """The side of a contender: every rank waits for a turn, the first rank answers, any rank says what went wrong."""

    def __init__(self, name: str, part: str) -> None:
        self.store = TCPStore("127.0.0.1", int(os.environ[PORT]), is_master=False, timeout=PATIENCE)
        self.key, self.first, self.turns = f"{part}/{name}", os.environ["RANK"] == "0", 0

    def answer(self, found: dict[str, Any]) -> bool:
        """Say what was found and sleep until the next turn; False where there is none."""
        if self.first:
            self.say(found)
        word = self.store.get(f"{self.key}/{self.turns}")
        self.turns += 1
        return bool(word == b"go")

    def say(self, found: dict[str, Any]) -> None:
        self.store.set(f"{self.key}/answer {self.turns}", json.dumps(found))


def take_turns(names: list[str], folder: str, tp: int, part: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Of every contender what it found coming up, and in each of its turns; only an error where it could not."""
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
