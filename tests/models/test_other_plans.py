"""Plans that nobody gets by default, for other machines, objectives and wishes, compute the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from models.tiny import save

OPTIONS: dict[str, dict[str, Any]] = {
    "slow ranks, long prompts": {"machine": "cpu", "objective": "prefill"},
    "slow ranks, training": {"machine": "cpu", "objective": "training"},
    "sequences where it pays": {"machine": "cpu", "objective": "prefill", "enable_sequence_parallel": "auto"},
    "room for all": {"memory_limit": 10**9},
    "turned round": {"constraints": {"*": "not row"}},
}
TYPES = ("llama", "gpt2", "gpt_neox", "bloom", "phi3", "falcon", "gptj", "olmo2", "gemma2", "opt")
ALWAYS = [pytest.param("llama", 2, "turned round", marks=long)]
EVERY = [(name, world, option) for option in OPTIONS for name in TYPES for world in (2, 4)]
"""All of them with ``PARAXIS_ALL=1``: half an hour."""


def compared(folder: str, option: str) -> dict[str, Any]:
    from models.compare import gradient_errors, parallel, reference

    (model, ctx), unsharded = parallel(folder, **OPTIONS[option]), reference(folder)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    output, expected = (m(input_ids=ids, labels=ids, use_cache=False) for m in (model, unsharded))
    output.loss.backward()
    expected.loss.backward()
    with torch.no_grad():
        tokens = [m.generate(ids[:, :5], max_new_tokens=4, do_sample=False).tolist() for m in (model, unsharded)]
    return {
        "logits": float((output.logits - expected.logits).abs().max()),
        "loss": float((output.loss - expected.loss).abs()),
        "gradients": max(gradient_errors(model, unsharded).values()),
        "tokens": tokens[0] == tokens[1],
        "axes": {layer.name: layer.axis for layer in ctx.plan.layers},
        "collectives": ctx.plan.count(),
    }


@pytest.mark.parametrize(("name", "world", "option"), EVERY if os.environ.get("PARAXIS_ALL") else ALWAYS)
def test_equals_the_unsharded_model(ranks: Any, tmp_path: Path, name: str, world: int, option: str) -> None:
    for found in ranks(world).run(compared, save(name, tmp_path), option, timeout=600):
        assert found["logits"] < 1e-4 and found["loss"] < 1e-5 and found["gradients"] < 1e-3 and found["tokens"]
        if option == "turned round":
            assert "row" not in found["axes"].values() and "column" in found["axes"].values()
        if option == "room for all":
            assert not found["collectives"]
