"""Working on many models, some at a time, each on ranks of its own."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ranks import RankPool

Record = dict[str, Any]


def in_turns(
    names: Sequence[str],
    world: int,
    work: Callable[[str, RankPool], Record],
    *,
    jobs: int = 1,
    state: Path | None = None,
    say: Callable[[Record], str] = json.dumps,
    again: bool = False,
) -> list[Record]:
    """What ``work`` returns for every name, in the order of the names.

    Results are written to ``state`` as they come, and those that it has already for this many ranks are not made again,
    unless ``again``.
    """
    done: dict[str, Record] = {}
    if state is not None and state.exists():
        kept = map(json.loads, state.read_text().splitlines())
        done = {record["name"]: record for record in kept if record["world"] == world}
    turns, lock = iter([name for name in names if again or name not in done]), threading.Lock()

    def serve() -> None:
        pool = RankPool(world)
        try:
            while True:
                with lock:
                    name = next(turns, None)
                if name is None:
                    return
                record = {**work(name, pool), "world": world}
                with lock:
                    done[name] = record
                    print(say(record), flush=True)
                    if state is not None:
                        state.parent.mkdir(parents=True, exist_ok=True)
                        with state.open("a") as file:
                            file.write(json.dumps(record) + "\n")
        finally:
            pool.close()

    with ThreadPoolExecutor(jobs) as workers:
        for served in [workers.submit(serve) for _ in range(jobs)]:
            served.result()
    return [done[name] for name in names]


def command(
    description: str | None,
    types: str,
    work: Callable[[str, RankPool], Record],
    right: Callable[[Record], bool],
    page: Callable[[dict[int, list[Record]]], str],
) -> int:
    """The command line of a script that works on many types at several numbers of ranks and writes a page of it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default=types, help="types, separated by commas")
    parser.add_argument("--tp", default="2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="types at a time, each on ranks of its own")
    parser.add_argument("--state", type=Path, help="where to keep results as they come; it goes on from there")
    parser.add_argument("--page", type=Path, help="where to write the table")
    options = parser.parse_args()
    records: dict[int, list[Record]] = {}
    for world in map(int, options.tp.split(",")):
        records[world] = in_turns(options.only.split(","), world, work, jobs=options.jobs, state=options.state)
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(records))
    return 0 if all(right(r) for several in records.values() for r in several) else 1
