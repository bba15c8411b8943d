"""``python -m zoo.batching``: ``generate_batch`` on many architectures, against ``generate`` of the unsharded model."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch

from ranks import RankPool
from zoo.cases import find
from zoo.check import pair
from zoo.jobs import Record, be_quiet, first_line, made_with, main, save_model

LENGTHS = (3, 11, 1, 7, 14, 5)
"""Tokens of the prompts, of which the last half begins like the first ones."""
NEW = 6
TYPES = (
    "llama,mistral,qwen2,qwen3,gemma,gemma2,gemma3_text,gpt2,gpt_neox,phi,phi3,falcon,stablelm,olmo,olmo2,cohere,cohere2,"
    "starcoder2,granite,glm,glm4,mixtral,qwen2_moe,qwen3_moe,nemotron,smollm3,helium,ernie4_5,exaone4,apertus,arcee,cwm,"
    "deepseek_v3,dots1,gpt_oss,granitemoe,hunyuan_v1_dense,minimax_m2,ministral,olmo3,olmoe,phimoe,seed_oss,solar_open,"
    "vaultgemma,mamba2"
)


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    ids[3:, :4] = ids[:3, :4]
    return [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]


def compare_batches(name: str, folder: str) -> dict[str, Any]:
    """Whether the tokens are those of the unsharded model, or why it cannot be batched."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    be_quiet()
    model, unsharded, ctx = pair(find(name), folder, "cpu")
    prompts = prompts_of(min(unsharded.config.get_text_config(decoder=True).vocab_size, 200))
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    right = [
        unsharded.generate(torch.tensor([p]), **{**options, "min_new_tokens": NEW})[0, len(p) :].tolist()
        for p in prompts
    ]
    config = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=16)
    try:
        found = model.generate_batch(prompts, GenerationConfig(**options), config)
    except NotImplementedError as error:
        return {"result": f"refused: {first_line(error)}"}
    return {
        "result": [each.generated_tokens for each in found.values()] == right,
        "errors": sorted({each.error for each in found.values() if each.error}),
        "breaks": list(ctx.plan.breaks),
        "heads": getattr(unsharded.config.get_text_config(decoder=True), "num_key_value_heads", None),
    }


def work(name: str, pool: RankPool) -> Record:
    """One type on all ranks of a pool."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            save_model(name, folder)
            results = pool.run(compare_batches, name, folder, timeout=900)
        except Exception as error:
            return {"name": name, "result": first_line(error)}
    same = all(result["result"] is True for result in results)
    return {"name": name, **results[0], "result": True if same else results[0]["result"]}


def fits(record: Record) -> bool:
    """Whether the tokens are right, in one graph, or the model is refused."""
    result = record["result"]
    return (result is True and not record["breaks"]) or str(result).startswith("refused")


def page(records: dict[int, list[Record]]) -> str:
    """Markdown: how many are right, then every type."""
    lines = [
        "# Continuous batching",
        "",
        "`generate_batch` of tiny models with random weights: prompts of 1 to 14 tokens, some with a common beginning,",
        "in steps of 16 tokens and blocks of 4 positions, against one-by-one `generate` of the unsharded model. Tokens",
        "must be equal, and the program one graph. Made by `make batching`.",
        "",
        made_with(),
        "",
    ]
    for world, found in records.items():
        lines.append(f"- {world} ranks: {sum(r['result'] is True for r in found)} of {len(found)} right.")
    lines += ["", "| type | ranks | KV heads | tokens equal |", "|---|---|---|---|"]
    for world, found in records.items():
        for r in sorted(found, key=lambda r: r["name"]):
            result = {True: "yes", False: "NO"}.get(r["result"], str(r["result"]))
            graphs = f", {len(r['breaks'])} graph breaks" if r.get("breaks") else ""
            lines.append(f"| {r['name']} | {world} | {r.get('heads') or ''} | {result}{graphs} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(__doc__, TYPES, work, fits, page))
