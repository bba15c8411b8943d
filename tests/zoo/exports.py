"""``python -m zoo.exports``: exported plans, run by the libraries they are for, against the unsharded model.

Every type of causal language model is exported for transformers and for torch, and run by these on real ranks: logits
in one call, tokens of greedy generation with a KV cache. What cannot be exported must say which modules and why.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ranks import RankPool
from zoo.cases import causal_types, find
from zoo.jobs import Record, be_quiet, building, first_line, made_with, main

LIMIT = 1e-4
NEW_TOKENS = 6
TORCH = (
    *("llama", "gemma", "gpt_neox", "gptj", "opt", "bloom", "phi", "phi3", "falcon", "stablelm", "olmo2", "qwen2"),
    *("qwen3", "starcoder2", "mixtral", "codegen", "biogpt", "mpt", "bert", "mamba"),
)
"""Types that are exported for torch too."""


def in_transformers(name: str, folder: str, plan: dict[str, str]) -> dict[str, Any]:
    """On a rank: load with transformers and this plan, and compare."""
    from transformers.distributed import DistributedConfig

    be_quiet()
    unsharded: Any = _class(folder).from_pretrained(folder, dtype=torch.float32).eval()
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    model = type(unsharded).from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()
    return compare_outputs(name, model, unsharded)


def in_torch(name: str, folder: str, source: str) -> dict[str, Any]:
    """On a rank: shard with torch's ``parallelize_module`` by the exported module, and compare."""
    be_quiet()
    unsharded: Any = _class(folder).from_pretrained(folder, dtype=torch.float32).eval()
    model: Any = _class(folder).from_pretrained(folder, dtype=torch.float32).eval()
    exported: dict[str, Any] = {}
    exec(compile(source, "plan.py", "exec"), exported)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return compare_outputs(name, exported["parallelize"](model, mesh), unsharded)


def _class(folder: str) -> Any:
    from paraxis.weights.hub import load_config_and_class

    return load_config_and_class(Path(folder), {})[1]


def compare_outputs(name: str, model: Any, unsharded: Any) -> dict[str, Any]:
    """The error of the logits, whether tokens are the same, and the fraction of the parameters on this rank."""
    inputs = {k: v for k, v in find(name).inputs(unsharded).items() if k != "labels"}
    with torch.no_grad():
        found, right = model(**inputs).logits, unsharded(**inputs).logits
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        result: dict[str, Any] = {"logits": float((found - right).abs().max()), "tokens": "none"}
        try:
            with torch.enable_grad():
                training = model(**inputs).logits.detach()
            result["logits"] = max(result["logits"], float((training - right).abs().max()))
        except RuntimeError as error:  # code that writes into a tensor that autograd has saved
            result["inference_only"] = first_line(error)
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        try:
            expected = unsharded.generate(inputs["input_ids"], **options)
        except Exception:  # the unsharded model cannot
            return result | share(model)
        result["tokens"] = "same" if torch.equal(model.generate(inputs["input_ids"], **options), expected) else "differ"
    return result | share(model)


def share(model: Any) -> dict[str, float]:
    """The elements on this rank over all."""
    local = total = 0
    for parameter in model.parameters():
        total += parameter.numel()
        local += parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
    return {"share": local / total}


def work(name: str, pool: RankPool) -> Record:
    """One type, exported and run by the library on all ranks of a pool."""
    kind, _, target = name.partition("+")
    target = target or "transformers"
    from paraxis.export import NotExportable, export_plan

    be_quiet()
    record: Record = {"name": name}
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        with building:
            try:
                find(kind).make().save_pretrained(folder)  # type: ignore[operator]
            except Exception as error:
                return record | {"unbuilt": first_line(error)}
            torch._dynamo.reset()
            started = time.monotonic()
            try:
                export = export_plan(folder, pool.world_size, target)
            except NotExportable as error:
                return record | {"refused": str(error)}
            except Exception as error:
                return record | {"error": f"export: {first_line(error)}"}
        data = export.to_json()
        record |= {key: data[key] for key in ("groups", "gathered", "replicated", "ships_plan", "sharded_fraction")}
        record |= {"seconds": time.monotonic() - started, "tried": export.error}
        try:
            if target == "torch":
                results = pool.run(in_torch, kind, folder, export.source, timeout=240)
            else:
                results = pool.run(in_transformers, kind, folder, export.plan, timeout=240)
        except Exception as error:
            return record | {"plan": export.plan, "error": first_line(error)}
    worst = max(results, key=lambda r: r["logits"] if r["logits"] == r["logits"] else float("inf"))
    tokens = {r["tokens"] for r in results}
    return record | {**worst, "tokens": "differ" if "differ" in tokens else worst["tokens"], "plan": export.plan}


def right(record: Record) -> bool:
    """Exported and the same in the other library, or refused with a reason."""
    if "refused" in record or "unbuilt" in record:
        return True
    return "error" not in record and record["logits"] <= LIMIT and record["tokens"] != "differ"


def page(records: dict[int, list[Record]]) -> str:
    """Markdown: a summary per library, then every type."""
    lines = [
        "# Exported plans, run by the libraries they are for",
        "",
        "`paraxis export` for every type of causal language model that can be built: tiny models with random weights,",
        "loaded by transformers with the exported `tp_plan`, or sharded by torch's `parallelize_module` with the",
        "exported module, on real gloo ranks. *logits*: the largest difference to the unsharded model in float32, with",
        f"and without gradients enabled (right: at most {LIMIT:g}; *inference*: an error if they are enabled, because",
        f"the model writes into a tensor that autograd has saved). *tokens*: {NEW_TOKENS} tokens of greedy generation",
        "with a KV cache. *share*: the fraction of the parameters on a rank. *ships*: whether transformers has a plan",
        "for the type. *sharded*: modules in which activations stay sharded between layers; *gathered*: layers whose",
        "output is gathered; *replicated*: what is not sharded. Made by `make exports`.",
        "",
        made_with(),
        "",
    ]
    for world, several in records.items():
        for target in ("transformers", "torch"):
            rows = [r for r in several if (r["name"].partition("+")[2] or "transformers") == target]
            ran = [r for r in rows if right(r) and "logits" in r]
            if rows:
                new = sum(not r["ships_plan"] for r in ran)
                refused, unbuilt = sum("refused" in r for r in rows), sum("unbuilt" in r for r in rows)
                wrong = [r["name"] for r in rows if not right(r)]
                lines.append(
                    f"- {target} at {world} ranks: {len(ran)} right, {new} of them without a plan in transformers; "
                    f"{refused} refused, {unbuilt} cannot be built, {len(wrong)} wrong{': ' if wrong else ''}"
                    f"{', '.join(wrong)}."
                )
    missing = sorted(set(types().split(",")) - {r["name"] for several in records.values() for r in several})
    if missing:
        lines.append(f"- not run for this page: {', '.join(missing)}.")
    lines += ["", "| type | ranks | logits | tokens | share | ships | sharded | gathered | replicated |"]
    lines += ["|" + "---|" * 9]
    listed = [(r["name"], world, r) for world, several in records.items() for r in several]
    lines += [f"| {name} | {world} | {_row(r)} |" for name, world, r in sorted(listed, key=lambda row: row[:2])]
    return "\n".join(lines) + "\n"


def _row(r: Record) -> str:
    for key in ("unbuilt", "refused", "error"):
        if key in r:
            title = {"unbuilt": "cannot be built", "refused": "refused", "error": "FAILS"}[key]
            return f"{title} | | | | | | {_cell(r[key])}"
    off = f"{r['logits']:.0e}" if r["logits"] <= LIMIT else f"WRONG {r['logits']:.0e}"
    off += ", inference" if "inference_only" in r else ""
    sharded = ", ".join(r["groups"])
    gathered = ", ".join(item["name"] for item in r["gathered"])
    replicated = "; ".join(f"{item['name']}: {item['reason']}" for item in r["replicated"])
    ships = "yes" if r["ships_plan"] else "no"
    return f"{off} | {r['tokens']} | {r['share']:.0%} | {ships} | {sharded} | {gathered} | {_cell(replicated)}"


def _cell(text: str) -> str:
    return re.sub(r"\S*/site-packages/", "", text).replace("|", "\\|").replace("\n", " ")


def types() -> str:
    """All types for transformers, some for torch."""
    return ",".join([*causal_types(), *(f"{name}+torch" for name in TORCH)])


if __name__ == "__main__":
    sys.exit(main(__doc__, types(), work, right, page))
