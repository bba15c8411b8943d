"""Models of many architectures against the unsharded ones: logits, loss, every gradient, tokens, sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.compare import batch, gradient_errors, max_difference, parallel, reference, same_tokens
from models.tiny import CONFIGS, PARALLEL_BLOCKS, config

from paraxis.distributed.collectives import count_collectives


def run_against_unsharded(folder: str, thorough: bool) -> dict[str, Any]:
    """A training step; if thorough, also inference, another shape and generation."""
    model, ctx = parallel(folder)
    unsharded = reference(folder)
    ids, labels = batch(unsharded.config.vocab_size)
    result, right = model(input_ids=ids, labels=labels), unsharded(input_ids=ids, labels=labels)
    result.loss.backward()
    right.loss.backward()
    found = {
        "same_class": type(model) is type(unsharded),
        "logits": result.logits.detach(),
        "expected": right.logits.detach(),
        "loss": abs(result.loss.item() - right.loss.item()),
        "gradients": gradient_errors(model, unsharded),
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "collectives": ctx.plan.count(),
        "fraction": ctx.plan.sharded_fraction,
        "replicated": [n for n, _ in ctx.plan.replicated if len(ctx.plan.parameters[n].global_shape) > 1],
        "layers": [(x.name, x.kind, x.axis) for x in ctx.plan.layers],
        "local": sum(p.to_local().numel() for p in model.parameters()),
        "total": sum(p.numel() for p in model.parameters()),
    }
    return {**found, **run_again(model, ctx, unsharded, ids)} if thorough else found


def run_again(model: Any, ctx: Any, unsharded: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Later captures: inference, another shape, and generation with a KV cache."""
    before, compiled = {name: id(p) for name, p in model.named_parameters()}, ctx.compile_times
    with torch.no_grad():
        with count_collectives() as collectives:
            first = max_difference(model(input_ids=ids).logits, unsharded(input_ids=ids).logits)
        longer = ids[:1].repeat(1, 2)
        second = max_difference(model(input_ids=longer).logits, unsharded(input_ids=longer).logits)
    return {
        "counted": dict(collectives.counts),
        "differences": [first, second],
        "tokens": same_tokens(model, unsharded, ids, 6),
        "same_parameters": before == {name: id(p) for name, p in model.named_parameters()},
        "recompiled": ctx.compile_times - compiled,
    }


THOROUGH = ("llama-tied", "gpt2")
"""Structurally different ones, for which inference, another shape and generation are compared too."""
ALWAYS = {("llama-tied", 2), ("gpt2", 2), ("bloom", 2)}
"""What `make test` has time for: the others have a similar structure, and the zoo covers them."""
CASES = [
    pytest.param(name, world, marks=() if (name, world) in ALWAYS else pytest.mark.long)
    for name in CONFIGS
    for world in (1, 2, 4)
    if world == 2 or name in {1: ("llama-tied", "gpt2", "falcon"), 4: ("llama-tied", "gpt2", "bloom", "olmo2")}[world]
]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_parallel_model_equals_the_unsharded_one(name: str, world: int, ranks: Any, checkpoints: Any) -> None:
    thorough = world == 2 and name in THOROUGH
    results = ranks(world).run(run_against_unsharded, checkpoints(name), thorough, timeout=300)
    for found in results:
        assert found["same_class"]
        assert (found["logits"] - found["expected"]).abs().max() < 1e-4
        assert found["loss"] < 1e-5
        wrong = {n: e for n, e in found["gradients"].items() if not e < 1e-3}
        assert not wrong, wrong
        assert found["tied"] == bool(getattr(config(name), "tie_word_embeddings", False))
        assert torch.equal(found["logits"], results[0]["logits"]), "the ranks disagree"
        assert_sharded(name, found, world, layers=2)
        if thorough:
            assert max(found["differences"]) < 1e-4 and found["tokens"]
            assert found["same_parameters"] and found["recompiled"] >= 2
            assert found["counted"] == found["collectives"]


def assert_sharded(name: str, found: dict[str, Any], world: int, layers: int) -> None:
    """Everything that can be sharded is, with few collectives."""
    assert all(axis in ("column", "row", "vocab") for _, _, axis in found["layers"]), found["layers"]
    assert found["replicated"] == []
    collectives = found["collectives"]
    if world == 1:
        assert collectives == {} and found["local"] == found["total"]
        return
    assert found["fraction"] <= {2: 0.55, 4: 0.30}[world]
    assert found["local"] <= {2: 0.55, 4: 0.30}[world] * found["total"]
    per_layer = 1 if name in PARALLEL_BLOCKS else 2
    if name == "olmo2":  # its norms over all heads need two means over the ranks, which share one small all-reduce
        per_layer += 1
    assert collectives["all_reduce"] <= per_layer * layers + 1
    assert collectives.get("all_gather", 0) <= 1
    assert set(collectives) <= {"all_reduce", "all_gather"}
