"""The ``torch.compile`` backend: used directly, and across recompilations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from models.compare import batch, context, parallel
from torch import nn

import paraxis
from paraxis import Config, MetaAwareMethodsPatcher, parallelize_backend
from ranks import spawn_ranks


def use_backend_directly(folder: str) -> tuple[torch.Tensor, bool, int, list[str]]:
    """Logits, whether a second compilation has the same parameters, compilations, and the layers of the plan."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ctx, config = context(), Config(init_seed=5)
    with MetaAwareMethodsPatcher():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    paraxis.move_model_to_device(model, torch.device("cpu"))
    paraxis.initialize_parameter_meta(model)
    compiled = torch.compile(model, fullgraph=True, backend=partial(parallelize_backend, ctx=ctx, config=config))
    ids, _ = batch(model.config.vocab_size)
    with torch.no_grad():
        logits = compiled(input_ids=ids)[0]
        before = [id(p) for p in ctx.last_optimized_graph_module.parameters()]
        compiled(input_ids=ids[:, :6])
    after = [id(p) for p in ctx.last_optimized_graph_module.parameters()]
    return logits, before == after, ctx.compile_times, [layer.axis for layer in ctx.plan.layers]


def test_backend_places_and_initializes_without_parallelize_model(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama-tied")
    one_rank = ranks(1).run(use_backend_directly, folder)[0][0]
    for logits, same_parameters, compiled, axes in ranks(2).run(use_backend_directly, folder):
        assert type(logits) is torch.Tensor and (logits - one_rank).abs().max() < 1e-4
        assert same_parameters and compiled == 2
        assert {"vocab", "column", "row"} == set(axes), "the plan says what was decided"


def recompile(folder: str) -> dict[str, Any]:
    """Compilations and parameters over calls of other shapes and modes."""
    model, ctx = parallel(folder)
    ids, labels = batch(model.config.vocab_size)
    counts, addresses = [], []
    for rows, length, train in ((2, 10, False), (2, 7, False), (1, 5, True), (2, 10, False)):
        model.train(train)
        model(input_ids=ids[:rows, :length], labels=labels[:rows, :length])
        counts.append(ctx.compile_times)
        addresses.append([(id(p), p.to_local().data_ptr()) for p in model.parameters()])
    program = ctx.last_optimized_graph_module
    return {
        "counts": counts,
        "same": all(a == addresses[0] for a in addresses),
        "layers": len(ctx.parallel_layer_cache),
        "inside": {id(p) for p in program.parameters()} <= {id(p) for p in model.parameters()},
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "types": {type(p).__name__ for p in model.parameters()},
    }


def test_parameters_and_layers_persist_over_recompilation(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(recompile, checkpoints("llama-tied")):
        assert found["counts"][0] == 1 and found["counts"][-2] > 1
        assert found["counts"][-1] == found["counts"][-2], "a known shape was compiled again"
        assert found["same"] and found["inside"] and found["tied"]
        assert found["layers"] == 1 + 1 + 2 * 7 + 1  # embedding, head, seven linears in each of two blocks, loss
        assert found["types"] == {"ShardedTensor"}


def replace_head(folder: str) -> None:
    """Call the model, replace a planned parameter, and call it again."""
    model, _ = parallel(folder)
    ids, _ = batch(model.config.vocab_size)
    model(input_ids=ids)
    model.lm_head = nn.Linear(64, 256, bias=False)
    model(input_ids=ids)


def test_replaced_parameter_is_refused_when_recompiling(checkpoints: Any) -> None:
    for outcome in spawn_ranks(2, replace_head, checkpoints("llama-tied"), timeout=90):
        assert outcome.error == "RuntimeError", outcome
        assert "illegal path for recompilation" in outcome.message and "lm_head.weight" in outcome.message
