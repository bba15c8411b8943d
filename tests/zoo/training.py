"""``python -m zoo.training``: twenty steps of AdamW against the unsharded model, on many architectures.

Each plain, with gradient clipping, with gradients accumulated over two batches, with activation checkpointing, and with
sequence parallelism. With dropout a sharded model draws other masks than the unsharded one: there two runs from one
seed must agree bit by bit, on all ranks, and differ from a run without dropout. On a mesh, two data-parallel ranks have
one row of every batch each, with replicated or with sharded parameters; the unsharded model accumulates over the rows.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from models.compare import parameter_errors
from models.meshes import mean_over_ranks, mesh_context

from ranks import RankPool
from zoo.cases import find
from zoo.check import pair
from zoo.jobs import Record, be_quiet, main, save_model, versions

TYPES = (
    "llama,gpt2,bloom,mixtral,gemma2,phi3,falcon,gptj,opt,mamba,bamba,qwen3_moe,deepseek_v3,stablelm,olmo2,t5*,"
    "bert-mlm*,starcoder2,gpt_neox,granitemoe"
)
WAYS = ("plain", "clipped", "accumulated", "checkpointed", "sequence")
WITH_DROPOUT = "gpt2,bert-mlm*,opt"
NAMES = [f"{kind}+{way}" for way in WAYS for kind in TYPES.split(",")]
NAMES += [f"{kind}+dropout" for kind in WITH_DROPOUT.split(",")]
ON_A_MESH = {
    "replicate": "llama,gpt2,mixtral,t5*",
    "shard": "llama,gpt2,mixtral,bloom,deepseek_v3,bamba,falcon,t5*,bert-mlm*",
}
NAMES += [f"{kind}+{way}" for way, kinds in ON_A_MESH.items() for kind in kinds.split(",")]
STEPS = 20


def batches(model: Any, case: Any, count: int) -> list[dict[str, Any]]:
    """The inputs of the case, with other tokens in every batch."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(count):
        inputs = {key: value.clone() for key, value in case.inputs(model).items()}
        for key in ("input_ids", "decoder_input_ids", "labels"):
            if key in inputs:
                ids = inputs[key]
                drawn = torch.randint(
                    3, min(250, model.config.get_text_config().vocab_size), ids.shape, generator=generator
                )
                inputs[key] = torch.where(ids == -100, ids, drawn)
        found.append(inputs)
    return found


def train(model: Any, data: list[dict[str, Any]], way: str, micro_batches: int = 0) -> list[float]:
    """The loss of every step, each of ``micro_batches``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, foreach=way != "clipped")
    each, losses = micro_batches or (2 if way == "accumulated" else 1), []
    for step in range(STEPS):
        total = 0.0
        for inputs in data[step * each : (step + 1) * each]:
            loss = model(**inputs).loss / each
            loss.backward()
            total += float(loss)
        if way == "clipped" or way in ON_A_MESH:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def row(inputs: dict[str, Any], index: int) -> dict[str, Any]:
    """One of the two rows of a batch."""
    return {key: value[index : index + 1] for key, value in inputs.items()}


def prepared(name: str, folder: str, way: str) -> tuple[Any, Any, Any]:
    """(parallel model, unsharded model, context)"""
    torch._dynamo.reset()
    options: dict[str, Any] = {"enable_sequence_parallel": True} if way == "sequence" else {}
    if way in ON_A_MESH:
        options = {"ctx": mesh_context(2, dist.get_world_size() // 2), "data_parallel": way}
    model, unsharded, ctx = pair(find(name), folder, "cpu", **options)
    for each in (model, unsharded):
        each.train()
        set_dropout(each, 0.1 if way == "dropout" else 0.0)
        if way == "checkpointed":
            each.gradient_checkpointing_enable()
    return model, unsharded, ctx


def set_dropout(model: Any, p: float) -> None:
    """Set the probability of every dropout, of modules and of attention."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        for field in ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "hidden_dropout"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, p)


def with_dropout(name: str, folder: str) -> dict[str, Any]:
    """The difference of two runs from one seed; infinite if dropout changes nothing."""
    runs = []
    for _ in range(2):
        model, unsharded, _ = prepared(name, folder, "dropout")
        torch.manual_seed(5)
        runs.append(train(model, batches(unsharded, find(name), 2 * STEPS), "plain"))
    set_dropout(unsharded, 0.0)
    right = train(unsharded, batches(unsharded, find(name), 2 * STEPS), "plain")
    difference = max(abs(a - b) for a, b in zip(*runs))
    effect = max(abs(a - b) for a, b in zip(runs[0], right))
    return {
        "losses": difference if effect > 1e-3 else float("inf"),
        "parameters": 0.0,
        "worst": "",
        "first": runs[0][0],
        "last": runs[0][-1],
        "all": runs[0],
    }


def compare_training(name: str, folder: str, way: str) -> dict[str, Any]:
    """On a rank: the errors of losses and of parameters after all steps."""
    be_quiet()
    if way == "dropout":
        return with_dropout(name, folder)
    model, unsharded, ctx = prepared(name, folder, way)
    data = batches(unsharded, find(name), 2 * STEPS)
    if way in ON_A_MESH:
        found = mean_over_ranks(train(model, [row(x, ctx.dp_rank) for x in data[:STEPS]], way), ctx.groups.dp)
        right = train(unsharded, [row(x, i) for x in data[:STEPS] for i in range(2)], way, micro_batches=2)
    else:
        found, right = train(model, data, way), train(unsharded, data, way)
    errors = parameter_errors(model, unsharded)
    worst = max(errors, key=lambda key: errors[key])
    return {
        "losses": max(abs(a - b) for a, b in zip(found, right)),
        "parameters": errors[worst],
        "worst": worst,
        "first": right[0],
        "last": right[-1],
    }


def work(name: str, pool: RankPool) -> Record:
    """One type, trained in one way on all ranks of a pool: ``llama+clipped``."""
    kind, _, way = name.partition("+")
    way = way or "plain"
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            save_model(kind, folder)
            results = pool.run(compare_training, kind, folder, way, timeout=900)
        except Exception as error:
            message = f"{type(error).__name__}: {str(error)[:600]}"
            return {"name": name, "way": way, "with": versions(), "error": message}
    worst = max(results, key=lambda r: max(r["losses"], r["parameters"]))
    seen = [r.pop("all", None) for r in results]
    if any(losses != seen[0] for losses in seen):
        worst["losses"] = float("inf")  # the ranks saw different losses
    return {"name": name, "way": way, "with": versions(), **worst}


def right(record: Record) -> bool:
    """Whether losses and parameters are within the tolerances."""
    return "error" not in record and record["losses"] < 1e-4 and record["parameters"] < 1e-3


def page(records: dict[int, list[Record]]) -> str:
    """Markdown: how many are right, then every type and way."""
    rows = [(r["name"], world, r) for world, several in records.items() for r in several]
    counts = []
    for each in dict.fromkeys(r.get("with", versions()) for _, _, r in rows):
        of = {world: [r for _, w, r in rows if w == world and r.get("with", versions()) == each] for world in records}
        right_ones = ", ".join(f"{sum(map(right, r))} of {len(r)} right at {w} ranks" for w, r in of.items() if r)
        counts.append(f"- {each}: {right_ones}.")
    lines = [
        "# Training against the unsharded model",
        "",
        f"Tiny models with random weights, {STEPS} steps of AdamW in float32 on the same batches: the largest",
        "difference of a loss (right: below 1e-4) and, at the end, of a parameter, relative to its norm (below 1e-3).",
        "Each plain, with gradient clipping, with gradients accumulated over two batches, with activation",
        "checkpointing, and with sequence parallelism. With dropout: the difference of two runs from one seed.",
        "*replicate* and *shard*: on a mesh with two data-parallel ranks, which have one row of every batch each. Made",
        "by `make training`.",
        "",
        f"{date.today().isoformat()}:",
        "",
        *counts,
        "",
        "| type | ranks | way | losses | parameters | loss, from and to | | torch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, world, r in sorted(rows, key=lambda row: row[:2]):
        kind, made = name.partition("+")[0], r.get("with", versions()).split(",")[0].removeprefix("torch ")
        if "error" in r:
            lines.append(f"| {kind} | {world} | {r['way']} | | | | {r['error'].splitlines()[0]} | {made} |")
            continue
        note = "right" if right(r) else f"WRONG {r['worst']}"
        figures = f"{r['losses']:.0e} | {r['parameters']:.0e} | {r['first']:.3f} {r['last']:.3f}"
        lines.append(f"| {kind} | {world} | {r['way']} | {figures} | {note} | {made} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(__doc__, ",".join(NAMES), work, right, page))
