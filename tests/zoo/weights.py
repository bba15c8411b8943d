"""``python -m zoo.weights``: from a checkpoint to shards and back, on many architectures.

Saved by transformers, parallelized, compared, saved by the ranks, loaded by transformers, compared again: the outputs
within 1e-4, the stored tensors bit by bit.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ranks import RankPool
from zoo.cases import find
from zoo.check import differences, pair, run
from zoo.jobs import Record, be_quiet, building, made_with, main, save_model

TYPES = (
    "llama,mistral,qwen2,qwen3,gemma,gemma2,gemma3_text,gpt2,gpt_neox,gptj,opt,bloom,phi,phi3,falcon,stablelm,olmo,"
    "olmo2,cohere,starcoder2,granite,glm,nemotron,gpt_bigcode,codegen,biogpt,mamba,bamba,mixtral,qwen2_moe,qwen3_moe,"
    "gpt_oss,deepseek_v3,olmoe,granitemoe,phimoe,dbrx,jetmoe,qwen3_next,minimax,t5*,bert-mlm*,clip*,vit-image*"
)


def stored(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- not a dictionary
    return found


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same in both, bit by bit."""
    return sorted(
        n for n in {*a, *b} if n not in a or n not in b or a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])
    )


def load_and_save(name: str, folder: str, target: str, size: int) -> dict[str, Any]:
    """On a rank: the error of the outputs after loading; then save, in files of about ``size`` bytes."""
    be_quiet()
    torch._dynamo.reset()
    model, unsharded, ctx = pair(find(name), folder, "cpu")
    inputs = find(name).inputs(unsharded)
    with torch.no_grad():
        found = {"loaded": differences(run(model, inputs), run(unsharded, inputs))}
    model.save_pretrained(target, max_shard_size=size)
    return {**found, "converted": len(ctx.state.conversions)}


def work(name: str, pool: RankPool) -> Record:
    """One type on all ranks of a pool."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as place:
        source, target = f"{place}/source", f"{place}/target"
        try:
            built = save_model(name, source)
            before = stored(source)
            size = sum(t.numel() * t.itemsize for t in before.values()) // 3
            results = pool.run(load_and_save, name, source, target, size, timeout=600)
            with building:
                again = type(built).from_pretrained(target, dtype=torch.float32).eval()
                plain = type(built).from_pretrained(source, dtype=torch.float32).eval()
            inputs = find(name).inputs(plain)
            with torch.no_grad():
                saved = differences(run(again, inputs), run(plain, inputs))
            return {
                "name": name,
                "loaded": max(r["loaded"] for r in results),
                "saved": saved,
                "converted": results[0]["converted"],
                "differing": differing(before, stored(target)),
                "files": len(list(Path(target).glob("*.safetensors"))),
            }
        except Exception as error:
            return {"name": name, "error": f"{type(error).__name__}: {str(error)[:400]}"}


def right(record: Record) -> bool:
    """Whether outputs are within the tolerances and the stored tensors equal."""
    return "error" not in record and record["loaded"] < 1e-4 and record["saved"] < 1e-5 and not record["differing"]


def page(records: dict[int, list[Record]]) -> str:
    """Markdown: how many are right, then every type."""
    counts = ", ".join(f"{sum(map(right, r))} of {len(r)} right at {world} ranks" for world, r in records.items())
    lines = [
        "# Checkpoints, loaded and saved",
        "",
        "Tiny models with random weights: saved by transformers, parallelized (*loaded*: the largest difference of an",
        "output), saved by the ranks in several files, loaded by transformers again (*saved*), stored tensors compared",
        "bit by bit. *Converted* parameters are stored in another form. Made by `make weights`.",
        "",
        f"{made_with()} {counts}.",
        "",
        "| type | ranks | loaded | saved | converted | files | |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [(r["name"], world, r) for world, several in records.items() for r in several]
    for name, world, r in sorted(rows, key=lambda row: row[:2]):
        if "error" in r:
            lines.append(f"| {name} | {world} | | | | | {r['error'].splitlines()[0]} |")
            continue
        note = "right" if right(r) else f"WRONG {', '.join(r['differing'][:3])}"
        figures = f"{r['loaded']:.0e} | {r['saved']:.0e} | {r['converted']} | {r['files']}"
        lines.append(f"| {name} | {world} | {figures} | {note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(__doc__, TYPES, work, right, page))
