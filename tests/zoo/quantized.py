"""``python -m zoo.quantized``: every quantized format on architectures of six kinds, on 1 to 4 ranks.

A checkpoint is written, parallelized, compared with an unsharded model that computes with the dequantized weights (and
rounds inputs, where the format does), saved by the ranks and compared bit by bit. Sizes divide neither by the ranks nor
by blocks and groups.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models.quantized import ARCHITECTURES, write
from models.quantized_formats import CASES
from weights.quantized.checkpoint import counted_reads

import paraxis
from paraxis.tensor.quantized import QuantizedTensor
from ranks import RankPool
from zoo.jobs import Record, be_quiet, building, first_line, made_with, run_jobs
from zoo.quantized_libraries import compare_with_library
from zoo.weights import differing, stored

IDS = torch.arange(14).view(2, 7) + 3


def names() -> list[str]:
    """Every format on every architecture that has it."""
    return [
        f"{case}/{kind}"
        for case, each in CASES.items()
        for kind in ARCHITECTURES
        if (kind in each.kinds if each.kinds else kind != "experts")
    ]


def load_and_save(folder: str, target: str, generates: bool) -> dict[str, Any]:
    """On a rank: logits, tokens, and bytes read and held of quantized weights; then save."""
    be_quiet()
    torch._dynamo.reset()
    ctx = paraxis.ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    with counted_reads() as read:
        model: Any = paraxis.parallelize_model(folder, ctx, show_progress=False, compile=None)
    with torch.no_grad():
        logits = model(IDS).logits
    tokens = model.generate(IDS, max_new_tokens=5, do_sample=False) if generates else None
    model.save_pretrained(target)
    encoded = [p for p in model.parameters() if isinstance(p.local, QuantizedTensor)]
    held = [p.local for p in encoded]
    planned = [p.spec.quantized.nbytes(p.placement, ctx.rank) for p in model.parameters() if p.spec.quantized]
    shards = sum(t.nbytes for p in encoded for n, t in p.local.parts.present() if n in p.spec.quantized.parts)
    return {
        "logits": logits,
        "tokens": tokens,
        "read": sum(read),
        "shards": shards,
        "held": sum(q.nbytes for q in held),
        "planned": sum(planned),
        "quantized": len(held),
    }


def work(name: str, pool: RankPool) -> Record:
    """One format on one architecture, on all ranks of a pool."""
    case, kind = name.split("/")
    each, generates = CASES[case], kind != "encoder"
    with tempfile.TemporaryDirectory(prefix="zoo-") as place:
        folder, target = Path(place) / "source", f"{place}/target"
        folder.mkdir()
        try:
            with building:
                be_quiet()
                reference = write(
                    kind, folder, each.format, each.config, each.dequantize, inputs=each.inputs, **each.overrides
                )
            results = pool.run(load_and_save, str(folder), target, generates, timeout=900)
            with torch.no_grad():
                logits = reference(IDS).logits
            tokens = reference.generate(IDS, max_new_tokens=5, do_sample=False) if generates else None
            return {
                "name": name,
                "error_of_logits": max(float((r["logits"] - logits).abs().max()) for r in results),
                "tokens": all(tokens is None or torch.equal(r["tokens"], tokens) for r in results),
                "quantized": results[0]["quantized"],
                "read": max(r["read"] / max(r["shards"], 1) for r in results),
                "planned": all(r["planned"] == r["held"] for r in results),
                "shard": max(r["held"] for r in results),
                "differing": differing(stored(folder), stored(target)),
            }
        except Exception as error:
            return {"name": name, "error": first_line(error)}


def right(record: Record) -> bool:
    """Whether logits, tokens, memory and files are as they should be."""
    return (
        "error" not in record
        and record["error_of_logits"] < CASES[record["name"].split("/")[0]].tolerance
        and record["tokens"]
        and record["planned"]
        and record["quantized"] > 0
        and not record["differing"]
    )


def page(records: list[Record], libraries: dict[str, str]) -> str:
    """Markdown: a row per format and architecture, with the ranks it was run on."""
    count = sum(map(right, records))
    lines = [
        "# Quantized checkpoints",
        "",
        "Tiny models with random weights, quantized, parallelized on real processes and compared in float32 with the",
        "unsharded model that computes with the dequantized weights, by arithmetic of its own: logits within 1e-4,",
        "greedy tokens equal. Where inputs are rounded too (the reference rounds them as well), logits within 2e-2: an",
        "input halfway between two codes may go either way after sums in another order. Then the ranks save the",
        "checkpoint, and every stored tensor is compared bit by bit. Hidden size 96, intermediate 176, 6 heads, blocks",
        "and groups of 16 and 32: neither divides evenly over 3 or 4 ranks. Made by `make quantized`.",
        "",
        "*Read* is how many bytes a rank reads of quantized weights, as a multiple of those it holds. The last table",
        "says whether the format's own library reads the same numbers from the stored tensors.",
        "",
        f"{made_with()} {count} of {len(records)} runs are right. There are {4 * len(names())} of all formats on all",
        "architectures that have them, on 1 to 4 ranks; the table has those that were run.",
        "",
        "| format | architecture | ranks | logits | read | |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[str, list[Record]] = {}
    for record in records:
        rows.setdefault(record["name"], []).append(record)
    for name in sorted(rows, key=names().index):
        several = sorted(rows[name], key=lambda r: r["world"])
        case, kind = name.split("/")
        worlds = " ".join(str(r["world"]) for r in several)
        wrong = [r for r in several if not right(r)]
        fine = [r for r in several if "error" not in r]
        error = f"{max(r['error_of_logits'] for r in fine):.0e}" if fine else ""
        read = f"{max(r['read'] for r in fine):.2f}" if fine else ""
        notes = [r.get("error") or f"WRONG {', '.join(r['differing'][:2])}" for r in wrong]
        model = ARCHITECTURES[kind][0]
        lines.append(f"| {case} | {kind} ({model}) | {worlds} | {error} | {read} | {'; '.join(notes) or 'right'} |")
    if libraries:
        lines += ["", "## Read by the formats' own libraries", "", "| format | library | |", "|---|---|---|"]
        lines += [f"| {case} | {text.replace(': ', ' | ', 1)} |" for case, text in libraries.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="formats, or format/architecture, separated by commas")
    parser.add_argument("--tp", default="1,2,3,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--state", type=Path, default=Path("../build/quantized.jsonl"), help="where results are stored")
    parser.add_argument("--page", type=Path, help="where to write the table")
    parser.add_argument("--so-far", action="store_true", help="run nothing: the page of the results that there are")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else []
    chosen = [name for name in names() if not wanted or name in wanted or name.split("/")[0] in wanted]
    if not options.so_far:
        for world in map(int, options.tp.split(",")):
            run_jobs(chosen, world, work, state=options.state)
    found = {(r["name"], r["world"]): r for r in map(json.loads, options.state.read_text().splitlines())}
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        libraries = {case: text for case in CASES if (text := compare_with_library(case))}
        options.page.write_text(page(list(found.values()), libraries))
    return 0 if all(right(r) for r in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
