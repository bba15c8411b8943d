"""``python -m zoo``: parallelize every model of the zoo, compare with the unsharded one, write the table."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import RankPool
from zoo.cases import all_cases, find
from zoo.check import compare_model
from zoo.jobs import be_quiet, building, run_jobs
from zoo.sizes import odd_sizes
from zoo.table import page


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--tp", default="2,4", help="numbers of ranks, separated by commas")
    parser.add_argument(
        "--state", type=Path, default=Path("build/zoo.jsonl"), help="results so far; delete it to start over"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per model")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each on its own ranks")
    parser.add_argument("--device", default="cpu", help="where the ranks run")
    parser.add_argument("--page", type=Path, help="where to write the table")
    options = parser.parse_args()
    worlds = [int(world) for world in options.tp.split(",")]
    if options.only:
        wanted = [(name, world) for world in worlds for name in split_names(options.only)]
    else:
        wanted = [(name, world) for world in worlds for name in all_cases()] + odd_sizes()
    done: dict[tuple[str, int], dict[str, Any]] = {}
    for world in dict.fromkeys(world for _, world in wanted):

        def work(name: str, pool: RankPool, world: int = world) -> dict[str, Any]:
            return run(name, world, pool, options)

        names = [name for name, w in wanted if w == world]
        records = run_jobs(
            names, world, work, jobs=options.jobs, state=options.state, say=line, again=bool(options.only)
        )
        done |= {(record["name"], world): record for record in records}
    chosen = [done[key] for key in wanted]
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(chosen))
    print(f"{sum(r['status'] == 'ok' for r in chosen)} of {len(chosen)} right")
    return 1 if any(r["status"] in ("wrong", "failed") for r in chosen) else 0


def split_names(text: str) -> list[str]:
    """Names separated by commas, some of which have fields in brackets, separated by commas too."""
    return re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)


def run(name: str, world: int, pool: RankPool, options: Any) -> dict[str, Any]:
    """Build, save, parallelize and compare one model."""
    started = time.monotonic()
    record: dict[str, Any] = {"name": name, "world": world, "kind": kind_of(name)}
    be_quiet()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            with building:
                case = find(name)
                model = case.make()
                model(**case.inputs(model))
                if case.kind != "module":
                    model.save_pretrained(folder)
        except Exception as error:
            return {**record, "status": "not built", "error": short(error), "seconds": time.monotonic() - started}
        try:
            source = None if case.kind == "module" else folder
            results = pool.run(compare_model, name, source, options.device, timeout=options.timeout)
        except Exception as error:
            return {**record, "status": "failed", "error": short(error), "seconds": time.monotonic() - started}
    record |= results[0]
    record["outputs"] = max(r["outputs"] for r in results)
    record["gradients"] = max(r["gradients"] for r in results)
    right = all(
        r["outputs"] < 1e-4
        and r["loss"] < 1e-5
        and (r["gradients"] < 1e-3 or r.get("rounded", False))
        and r.get("tokens", True)
        for r in results
    )
    return {**record, "status": "ok" if right else "wrong", "seconds": time.monotonic() - started}


def kind_of(name: str) -> str:
    """The table that a case belongs to."""
    base, _, fields = name.partition("[")
    return "size" if fields else all_cases()[base].kind


def short(error: Exception) -> str:
    """The message of an error, without the middle if it is very long."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 8000 else f"{text[:3000]}\n...\n{text[-5000:]}"


def line(record: dict[str, Any]) -> str:
    """What is printed of a result."""
    head = f"{record['name']:28} tp={record['world']} {record['status']:9} {record['seconds']:5.1f}s"
    if "error" in record:
        return f"{head} {record['error'].splitlines()[0][:150]}"
    numbers = f"out {record['outputs']:.0e} grad {record['gradients']:.0e} tokens {record.get('tokens', '-')}"
    return f"{head} {record['fraction']:.2f} {numbers} {record['collectives']} replicated {len(record['replicated'])}"


if __name__ == "__main__":
    sys.exit(main())
