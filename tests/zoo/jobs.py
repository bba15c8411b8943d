"""Running a job per model, several at a time, each on its own ranks, and what the pages of results share."""

from __future__ import annotations

import argparse
import json
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from ranks import RankPool

Record = dict[str, Any]
"""The result of a job: it has a ``name``, and can be written as JSON."""

building = threading.Lock()
"""Held while a model is built or loaded: transformers changes how tensors are initialized for all threads, and models
draw their weights from the one global generator."""


def save_model(name: str, folder: str) -> Any:
    """Build a model of the zoo and save its checkpoint; the model."""
    from zoo.cases import find

    with building:
        model: Any = find(name).make()
        model.save_pretrained(folder)
    return model


def be_quiet() -> None:
    """No warnings and progress bars of transformers and torch: many tiny models are unusual ones."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def first_line(error: BaseException, length: int = 300) -> str:
    """The type of an error, and the first line that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:length] if lines else ''}"


def versions() -> str:
    """The versions that a result depends on."""
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"


def made_with() -> str:
    """The line of a page that says when and with what it was made."""
    return f"{date.today().isoformat()}, {versions()}."


def results_in(state: Path | None, world: int) -> dict[str, Record]:
    """The latest result of every name for this number of ranks."""
    if state is None or not state.exists():
        return {}
    records = map(json.loads, state.read_text().splitlines())
    return {record["name"]: record for record in records if record["world"] == world}


def append(state: Path | None, record: Record) -> None:
    """Append a result to the file of results."""
    if state is not None:
        state.parent.mkdir(parents=True, exist_ok=True)
        with state.open("a") as file:
            file.write(json.dumps(record) + "\n")


def run_jobs(
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

    Results are appended to ``state`` as they come. A result that it already has for this number of ranks is not
    computed again, unless ``again``.
    """
    done = results_in(state, world)
    todo, lock = iter([name for name in names if again or name not in done]), threading.Lock()

    def serve() -> None:
        pool = RankPool(world)
        try:
            while True:
                with lock:
                    name = next(todo, None)
                if name is None:
                    return
                record = {**work(name, pool), "world": world}
                with lock:
                    done[name] = record
                    print(say(record), flush=True)
                    append(state, record)
        finally:
            pool.close()

    with ThreadPoolExecutor(jobs) as workers:
        for served in [workers.submit(serve) for _ in range(jobs)]:
            served.result()
    return [done[name] for name in names]


def main(
    description: str | None,
    types: str,
    work: Callable[[str, RankPool], Record],
    right: Callable[[Record], bool],
    page: Callable[[dict[int, list[Record]]], str],
    worlds: str = "2,4",
) -> int:
    """The command line of a script that runs a job per type at several numbers of ranks and writes a page of it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default=types, help="types, separated by commas")
    parser.add_argument("--tp", default=worlds, help="numbers of ranks, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="types at a time, each on its own ranks")
    parser.add_argument("--state", type=Path, help="file for results as they come; a second run resumes from it")
    parser.add_argument("--page", type=Path, help="where to write the table")
    options = parser.parse_args()
    records: dict[int, list[Record]] = {}
    for world in map(int, options.tp.split(",")):
        records[world] = run_jobs(options.only.split(","), world, work, jobs=options.jobs, state=options.state)
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(records))
    return 0 if all(right(r) for several in records.values() for r in several) else 1
