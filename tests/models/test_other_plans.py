"""Plans for other machines, objectives and constraints than the default ones compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import parallel, reference, same_tokens, step_errors

OPTIONS: dict[str, dict[str, Any]] = {
    "slow ranks, prefill": {"machine": "cpu", "objective": "prefill"},
    "slow ranks, training": {"machine": "cpu", "objective": "training"},
    "sequence parallelism where it pays": {
        "machine": "cpu",
        "objective": "prefill",
        "enable_sequence_parallel": "auto",
    },
    "memory for all weights": {"memory_limit": 10**9},
    "no row layers": {"constraints": {"*": "not row"}},
}
TYPES = ("llama", "gpt2", "gpt_neox", "bloom", "phi3", "falcon", "gptj", "olmo2", "gemma2", "opt")
ALWAYS = ("llama", 2, "no row layers")
CASES = [
    pytest.param(name, world, option, marks=() if (name, world, option) == ALWAYS else pytest.mark.long)
    for option in OPTIONS
    for name in TYPES
    for world in (2, 4)
]
"""Half an hour in all."""


def run_against_unsharded(folder: str, option: str) -> dict[str, Any]:
    """Errors of a step, tokens, and the plan."""
    (model, ctx), unsharded = parallel(folder, **OPTIONS[option]), reference(folder)
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    errors = step_errors(model, unsharded, {"input_ids": ids, "labels": ids, "use_cache": False})
    return {
        **errors,
        "tokens": same_tokens(model, unsharded, ids[:, :5], 4),
        "axes": {layer.name: layer.axis for layer in ctx.plan.layers},
        "collectives": ctx.plan.count(),
    }


@pytest.mark.parametrize(("name", "world", "option"), CASES)
def test_plan_computes_what_the_unsharded_model_does(
    ranks: Any, checkpoints: Any, name: str, world: int, option: str
) -> None:
    for found in ranks(world).run(run_against_unsharded, checkpoints(name), option, timeout=600):
        assert found["logits"] < 1e-4 and found["loss"] < 1e-5 and found["gradients"] < 1e-3 and found["tokens"]
        if option == "no row layers":
            assert "row" not in found["axes"].values() and "column" in found["axes"].values()
        if option == "memory for all weights":
            assert not found["collectives"]
