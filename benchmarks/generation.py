"""Generation and training side by side: ``python benchmarks/generation.py [--shapes llama,gpt2,mixtral] [--tp 2]``.

Every contender runs in processes of its own, one after the other on the same machine, in several rounds; of each figure
the best round counts. Ratios are of figures from the same run. Writes a page and, where matplotlib is at hand, a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from contenders import ALONE, CONTENDERS
from rich.console import Console
from rich.table import Table
from shapes import save

HERE = Path(__file__).parent
FIGURES = {
    "load": ("load, s", 1.0),
    "plan": ("plan, s", 1.0),
    "first": ("first call, s", 1.0),
    "prefill": ("prefill of 512, ms", 1e3),
    "decode": ("per token, ms", 1e3),
    "memory_generation": ("memory per rank, MiB", 1.0),
    "training": ("training step of 128, ms", 1e3),
    "memory_training": ("memory, training, MiB", 1.0),
    "collectives": ("collectives per token", 1.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama,gpt2,mixtral")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the page and the plot")
    options = parser.parse_args()
    results = {shape: compare(shape, options.tp, options.rounds) for shape in options.shapes.split(",")}
    for shape, found in results.items():
        Console(width=150).print(table(shape, found, options.tp))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.md").write_text(page(results, options.tp))
        plot(results, options.out / "bench.png")
    return 0


def compare(shape: str, tp: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The best figures of every contender, or why it has none."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        save(shape, folder)
        for _ in range(rounds):
            for name in CONTENDERS:
                if "error" in found.get(name, {}):
                    continue
                new = run(name, folder, tp, "generation")
                if "error" not in new:
                    new = {**run(name, folder, tp, "training"), **new}
                old = found.get(name, new)
                best = {key: min(old[key], new[key]) for key in FIGURES if key in old and key in new}
                found[name] = {**new, **best}
    right = found["one process"].get("tokens")
    for result in found.values():
        result["same"] = result.get("tokens") == right
    return found


def run(name: str, folder: str, tp: int, part: str) -> dict[str, Any]:
    """One contender in processes of its own."""
    launch = [sys.executable]
    if name not in ALONE:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    command = [*launch, str(HERE / "measure.py"), name, folder, part]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"contender": name, "error": errors[0].strip() if errors else "no result"}


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One row per contender: its figures, with their ratio to ours where that is of interest."""
    lines = []
    ours = found.get("paraxis", {})
    for name, result in found.items():
        if "error" in result:
            lines.append([name, *[""] * len(FIGURES), result["error"][-90:]])
            continue
        cells = []
        for key, (_, scale) in FIGURES.items():
            text = f"{result[key] * scale:.{1 if key in ('load', 'first', 'plan') else 0}f}" if key in result else ""
            if key in ("prefill", "decode", "training") and key in ours and name != "paraxis":
                text += f" ({result[key] / ours[key]:.2f}×)"
            cells.append(text)
        lines.append([name, *cells, "same" if result["same"] else "other tokens"])
    return lines


def table(shape: str, found: dict[str, dict[str, Any]], tp: int) -> Table:
    result = Table(title=f"{shape}, {tp} ranks (in brackets: the time over ours)")
    for column in ("", *(title for title, _ in FIGURES.values()), "tokens"):
        result.add_column(column)
    for row in rows(found):
        result.add_row(*row)
    return result


def page(results: dict[str, dict[str, dict[str, Any]]], tp: int) -> str:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    lines = [
        "# Generation and training, side by side",
        "",
        f"{date.today().isoformat()}, {device}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {tp} ranks with one thread each, float32, batch 1, context 512. Made by "
        "`make bench`. In brackets: the time over that of paraxis in the same run. Memory: the most anonymous "
        "memory of a rank, with its parameters that lie in mapped files; generating and training are in processes of "
        "their own.",
        "",
    ]
    for shape, found in results.items():
        titles = ["", *(title for title, _ in FIGURES.values()), "tokens"]
        lines += [f"## {shape}", "", "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
        lines += ["| " + " | ".join(row) + " |" for row in rows(found)]
        lines.append("")
    return "\n".join([*lines, "![Time per token and prefill](bench.png)", ""])


def plot(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5))
    for axis, key in zip(axes, ("decode", "prefill"), strict=True):
        for k, name in enumerate(CONTENDERS):
            heights = [results[shape][name].get(key, 0) * 1e3 for shape in results]
            axis.bar([x + 0.16 * k for x in range(len(results))], heights, 0.15, label=name)
        axis.set_xticks([x + 0.3 for x in range(len(results))], list(results))
        axis.set_title(FIGURES[key][0])
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
