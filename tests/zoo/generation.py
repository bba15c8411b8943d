"""``python -m zoo.generation``: ``generate`` in its modes, on many architectures, against the unsharded model."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ranks import RankPool
from zoo.cases import find
from zoo.check import pair
from zoo.jobs import be_quiet, first_line, made_with, run_jobs, save_model

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
MODES = ("dynamic", "static", "beams", "padded", "sampled")
TYPES = (
    "llama,mistral,qwen2,qwen3,gemma,gemma2,gemma3_text,gpt2,gpt_neox,gptj,opt,bloom,phi,phi3,falcon,stablelm,olmo,"
    "olmo2,cohere,cohere2,starcoder2,granite,glm,glm4,mixtral,qwen2_moe,qwen3_moe,nemotron,smollm3,gpt_bigcode,"
    "codegen,helium,ernie4_5,exaone4,persimmon,biogpt,apertus,arcee,bitnet,cwm,dbrx,deepseek_v2,deepseek_v3,diffllama,"
    "dots1,ernie4_5_moe,flex_olmo,glm4_moe,gpt_neo,gpt_oss,granitemoe,hunyuan_v1_dense,jetmoe,llama4_text,minimax_m2,"
    "ministral,mpt,nanochat,olmo3,olmoe,openai-gpt,phimoe,seed_oss,solar_open,vaultgemma,xglm,bamba,falcon_h1,mamba2,"
    "qwen3_next"
)


def padded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A batch in which one prompt is shorter, padded on the left."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return model.generate(ids, attention_mask=mask, **NEW)  # type: ignore[no-any-return]


def generate(model: Any, ids: torch.Tensor, mode: str) -> list[Any]:
    """The tokens of one mode."""
    if mode == "padded":
        return padded(model, ids).tolist()
    options: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "beams": {"num_beams": 3},
        "sampled": {"do_sample": True, "temperature": 1.5},
    }
    return model.generate(ids, **{**NEW, **options[mode]}).tolist()  # type: ignore[no-any-return]


def compare_modes(name: str, folder: str, device: str) -> dict[str, Any]:
    """For every mode: whether the tokens are those of the unsharded model, or why that cannot generate."""
    be_quiet()
    model, unsharded, ctx = pair(find(name), folder, device)
    ids = find(name).inputs(unsharded)["input_ids"].to(device)
    found: dict[str, Any] = {}
    for mode in MODES:
        if mode == "sampled":  # compared between the ranks, which start from different seeds
            torch.manual_seed(ctx.rank)
            found[mode] = generate(model, ids, mode)
            continue
        try:
            expected = generate(unsharded, ids, mode)
        except Exception as error:
            found[mode] = f"unsharded model: {first_line(error)}"
            continue
        found[mode] = generate(model, ids, mode) == expected
    return found


def run(name: str, pool: RankPool, device: str) -> dict[str, Any]:
    """One type on all ranks of a pool."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            save_model(name, folder)
        except Exception as error:
            not_built = f"not built: {first_line(error)}"
            return {"name": name, **dict.fromkeys(MODES, "not built"), MODES[0]: not_built}
        try:
            results = pool.run(compare_modes, name, folder, device, timeout=600)
        except Exception as error:
            return {"name": name, **dict.fromkeys(MODES, f"{type(error).__name__}: {str(error)[:300]}")}
    first = dict(results[0])
    for mode in MODES[:-1]:
        if any(r[mode] is False for r in results):
            first[mode] = False
    first["sampled"] = all(r["sampled"] == first["sampled"] for r in results)
    return {"name": name, **first}


def page(records: list[dict[str, Any]], world: int) -> str:
    """Markdown: how many are right in each mode, then every type."""
    lines = [
        "# Generation",
        "",
        f"Tiny models with random weights on {world} ranks, against the unsharded model: tokens exact with a dynamic",
        "and a static cache, with 3 beams and in a padded batch; sampled tokens the same on all ranks, which start",
        "from different seeds. Made by `make generation`.",
        "",
        made_with(),
        "",
    ]
    for mode in MODES:
        lines.append(f"- {mode}: {sum(r[mode] is True for r in records)} of {len(records)} right.")
    lines += ["", f"| type | {' | '.join(MODES)} |", f"|---|{'---|' * len(MODES)}"]
    for record in sorted(records, key=lambda r: r["name"]):
        cells = ["yes" if record[m] is True else "NO" if record[m] is False else str(record[m]) for m in MODES]
        lines.append(f"| {record['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=TYPES, help="types, separated by commas")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="types at a time, each on its own ranks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--state", type=Path, help="file for results as they come; a second run resumes from it")
    parser.add_argument("--page", type=Path, help="where to write the table")
    options = parser.parse_args()
    names = options.only.split(",")

    def work(name: str, pool: RankPool) -> dict[str, Any]:
        return run(name, pool, options.device)

    records = run_jobs(names, options.tp, work, jobs=options.jobs, state=options.state)
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(records, options.tp))
    return 1 if any(record[mode] is False for record in records for mode in MODES) else 0


if __name__ == "__main__":
    sys.exit(main())
