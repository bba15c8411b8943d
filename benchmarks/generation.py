"""Generation and training side by side: ``python benchmarks/generation.py [--shapes llama,gpt2,mixtral] [--tp 2]``.

Every contender runs in processes of its own. All run at the same time and take turns on the same cores (see `turns`);
figures are medians over the turns. Writes a page and, if matplotlib is installed, a plot.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from contenders import CONTENDERS
from rich.console import Console
from rich.table import Table
from shapes import save
from turns import take_turns

FIGURES = {
    "load": ("load, s", 1.0),
    "plan": ("plan, s", 1.0),
    "first": ("first call, s", 1.0),
    "prefill": ("prefill of 512, ms", 1e3),
    "decode": ("time per output token, ms", 1e3),
    "memory_generation": ("memory per rank, MiB", 1.0),
    "training": ("training step of 128, ms", 1e3),
    "memory_training": ("memory, training, MiB", 1.0),
    "collectives": ("collectives per decode step", 1.0),
}


def main() -> int:
    """Compare the contenders on every shape; print tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama,gpt2,mixtral")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="turns that every contender takes")
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
    """The figures of every contender, or why it has none."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        save(shape, folder)
        names = list(CONTENDERS)
        for part in ("training", "generation"):
            for name, turns in take_turns(names, folder, tp, part, rounds).items():
                found[name] = {**found.get(name, {}), **figures(turns)}
            names = [name for name in names if "error" not in found[name]]
    right = found["one process"].get("tokens")
    for result in found.values():
        result["same"] = result.get("tokens") == right
    return found


def figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of loading, and the medians over the turns of the others."""
    up, *later = turns
    errors = [turn for turn in turns if "error" in turn]
    if errors:
        return errors[0]
    result = dict(up)
    for key in later[0] if later else ():
        values = [turn[key] for turn in later]
        if key == "tokens":
            result[key] = values[-1]
        else:
            result[key] = median(itertools.chain.from_iterable(values) if isinstance(values[0], list) else values)
    return result


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One row per contender: its figures, times with their ratio to ours."""
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
    """The figures of one shape for the terminal."""
    result = Table(title=f"{shape}, {tp} ranks (in brackets: relative to ours)")
    for column in ("", *(title for title, _ in FIGURES.values()), "tokens"):
        result.add_column(column)
    for row in rows(found):
        result.add_row(*row)
    return result


def page(results: dict[str, dict[str, dict[str, Any]]], tp: int) -> str:
    """All figures as Markdown."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    lines = [
        "# Generation and training, side by side",
        "",
        f"{date.today().isoformat()}, {device}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {tp} ranks with one thread each, float32, batch 1, context 512. Made by "
        "`make bench`. All contenders run at the same time and take turns; times are medians over the turns, in "
        "brackets relative to paraxis. Memory: the peak of a rank's anonymous memory plus its memory-mapped "
        "parameters; generation and training run in separate processes.",
        "",
    ]
    for shape, found in results.items():
        titles = ["", *(title for title, _ in FIGURES.values()), "tokens"]
        lines += [f"## {shape}", "", "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
        lines += ["| " + " | ".join(row) + " |" for row in rows(found)]
        lines.append("")
    return "\n".join([*lines, "![Time per output token and prefill](bench.png)", ""])


def plot(results: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Bars of time per output token and prefill, if matplotlib is installed."""
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
