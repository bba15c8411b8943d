"""A submodule of a parallel model that is called alone runs its own sharded program, with its hooks around it."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from models.compare import batch, full, gradient_errors, max_difference, parallel, reference

from paraxis.runtime.submodule_call import SubmoduleCall


def call_submodules(folder: str, compile: Any) -> dict[str, Any]:
    """Errors of submodules that are called alone before and after the model, and the warnings."""
    (model, ctx), unsharded = parallel(folder, compile=compile), reference(folder)
    ids, _ = batch(256)
    seen: list[Any] = []
    model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    errors, compiled = [], []
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            hidden = unsharded.model(ids).last_hidden_state
            errors.append(max_difference(model.model(ids).last_hidden_state, hidden))
            errors.append(max_difference(model.lm_head(hidden), unsharded.lm_head(hidden)))
            embedded = model.get_input_embeddings()(ids)
            errors.append(max_difference(embedded, unsharded.get_input_embeddings()(ids)))
            errors.append(max_difference(seen[-1], hidden))
            compiled.append(ctx.compile_times)
            errors.append(max_difference(model(input_ids=ids).logits, unsharded(input_ids=ids).logits))
    return {
        "errors": errors,
        "compiled": compiled,
        "gathered": [str(w.message) for w in caught if "sharded" in str(w.message)],
        "hooked": len(seen),
        "local": tuple(model.lm_head.weight.to_local().shape),
        "copy": max_difference(copy.deepcopy(model).lm_head(hidden), unsharded.lm_head(hidden)),
        "call": isinstance(model.lm_head._compiled_call_impl, SubmoduleCall),
    }


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_submodules_called_alone_run_sharded(ranks: Any, checkpoints: Any, compile: Any) -> None:
    for found in ranks(2).run(call_submodules, checkpoints("llama", num_hidden_layers=1), compile):
        assert max(found["errors"]) < 1e-4 and found["copy"] < 1e-4
        assert found["compiled"][0] == 3 and found["compiled"][1] <= 7, "one program for each, used again"
        assert found["gathered"] == [] and found["hooked"] == 4
        assert found["local"] == (128, 64) and found["call"]


def train_a_submodule(folder: str) -> float:
    """The largest error of a gradient of a loss on the hidden states of the base model alone."""
    (model, _), unsharded = parallel(folder), reference(folder)
    ids, _ = batch(256)
    for one in (model, unsharded):
        one.model(input_ids=ids).last_hidden_state.square().mean().backward()
    assert full(model.model.embed_tokens.weight.grad).abs().sum() > 0
    return max(gradient_errors(model, unsharded).values())


def test_gradients_through_a_submodule_called_alone(ranks: Any, checkpoints: Any) -> None:
    assert max(ranks(2).run(train_a_submodule, checkpoints("llama", num_hidden_layers=1))) < 1e-3


class Lines(logging.Handler):
    """The lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compile_again(folder: str) -> dict[str, Any]:
    """Errors of a parallel model on which ``torch.compile`` and ``compile()`` were called."""
    (model, ctx), unsharded = parallel(folder), reference(folder)
    ids, labels = batch(256)
    log, logger = Lines(), logging.getLogger("paraxis")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        model.compile(fullgraph=True)
        for layer in model.model.layers:
            layer.compile()
    finally:
        logger.removeHandler(log)
    errors = []
    with torch.no_grad():
        expected = unsharded(input_ids=ids).logits
        wrapped = [torch.compile(model), torch.compile(model, fullgraph=True, mode="reduce-overhead")]
        for one in (model, *wrapped):
            errors.append(max_difference(one(input_ids=ids).logits, expected))
        inner = torch.compile(model.model)(ids).last_hidden_state
        errors.append(max_difference(inner, unsharded.model(ids).last_hidden_state))
    compiled = ctx.compile_times
    tokens = [one.generate(ids, max_new_tokens=3, do_sample=False) for one in (wrapped[0], unsharded)]
    for one in (wrapped[1], unsharded):
        one.train()
        one(input_ids=ids, labels=labels).loss.backward()
    return {
        "errors": errors,
        "compiled": compiled,
        "tokens": torch.equal(*tokens),
        "gradients": max(gradient_errors(model, unsharded).values()),
        "notes": [line for line in log.lines if "no effect" in line],
    }


def test_compiling_a_parallel_model_has_no_effect(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(compile_again, checkpoints("llama", num_hidden_layers=1)):
        assert max(found["errors"]) < 1e-4 and found["gradients"] < 1e-3 and found["tokens"]
        assert found["compiled"] == 2, "one program of the model, and one of model.model"
        assert len(found["notes"]) <= 1
