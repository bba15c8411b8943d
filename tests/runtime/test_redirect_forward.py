"""The forward of a parallel model runs its program, whoever calls it; a deep copy has its own program."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from models.compare import batch, max_difference, parallel, reference


def call_in_every_way(folder: str) -> dict[str, Any]:
    """Errors of calling the model, its forward, and the forward of a wrapper; hooks, and a deep copy."""
    (model, ctx), unsharded = parallel(folder), reference(folder)
    ids, _ = batch(256)
    hooked: list[int] = []
    handle = model.register_forward_hook(lambda module, args, output: hooked.append(1))
    with torch.no_grad():
        expected = unsharded(input_ids=ids).logits
        errors = [max_difference(call(input_ids=ids).logits, expected) for call in (model, model.forward)]
        handle.remove()
        compiled = ctx.compile_times
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        errors.append(max_difference(twin(input_ids=ids).logits, expected))
    return {
        "errors": errors,
        "hooked": len(hooked),
        "signature": inspect.signature(model.forward) == inspect.signature(unsharded.forward),
        "compiled": compiled,
        "copies": not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()},
        "methods": twin.generate is not model.generate,
    }


def test_every_call_runs_the_program(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(call_in_every_way, checkpoints("llama")):
        assert max(found["errors"]) < 1e-4
        assert found["hooked"] == 1, "hooks run around a call of the model, not around its forward"
        assert found["signature"] and found["compiled"] == 1, "both calls run the same program"
        assert found["copies"] and found["methods"]
