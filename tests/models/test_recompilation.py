"""What happens after the first compilation, and without a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from models.compare import batch, context, parallel, reference
from models.tiny import build, save
from torch import nn

import paraxis
from paraxis import Config, MetaAwareMethodsPatcher, parallelize_backend, parallelize_model
from paraxis.tensor.sharded_tensor import ShardedTensor
from ranks import spawn_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-tied", tmp_path_factory.mktemp("llama"))


def initialized(folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and some weights of a model without a checkpoint."""
    torch.manual_seed(3)
    model, _ = parallel(folder, skip_load_weights=True, weight_init_fn=partial(nn.init.normal_, std=0.1))
    ids, _ = batch(model.config.vocab_size)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return logits, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@long
def test_the_same_seed_gives_the_same_model_on_any_number_of_ranks(ranks: Any, tmp_path: Any) -> None:
    folder = save("gpt2", tmp_path)
    runs = {world: ranks(world).run(initialized, folder) for world in (1, 4)}
    logits, weights = runs[1][0]
    assert logits.std() > 1e-3
    for results in runs.values():
        for other, values in results:
            assert (other - logits).abs().max() < 1e-4
            assert all(torch.equal(values[n], weights[n]) for n in weights)


def persistence(folder: str) -> dict[str, Any]:
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
        "state": {n: type(v).__name__ for n, v in model.state_dict().items()},
        "kinds": {type(p).__name__ for p in model.parameters()},
    }


def test_parameters_persist_over_recompilation(checkpoint: str, ranks: Any) -> None:
    for found in ranks(2).run(persistence, checkpoint):
        assert found["counts"][0] == 1 and found["counts"][-2] > 1
        assert found["counts"][-1] == found["counts"][-2], "a known shape was compiled again"
        assert found["same"] and found["inside"] and found["tied"]
        assert found["layers"] == 1 + 1 + 2 * 7 + 1  # table, head, seven linears in each of two blocks, loss
        assert set(found["state"].values()) == {"DTensor"} and "lm_head.weight" in found["state"]
        assert found["kinds"] == {"ShardedTensor"}


def by_hand(folder: str) -> tuple[torch.Tensor, bool, int]:
    """The backend as the user of ``torch.compile`` meets it."""
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
    return logits, before == after, ctx.compile_times


def test_the_backend_works_by_hand(checkpoint: str, ranks: Any) -> None:
    alone = ranks(1).run(by_hand, checkpoint)[0][0]
    for logits, persisted, compiled in ranks(2).run(by_hand, checkpoint):
        assert type(logits) is torch.Tensor and (logits - alone).abs().max() < 1e-4
        assert persisted and compiled == 2


def replaced_head(folder: str) -> None:
    model, _ = parallel(folder)
    ids, _ = batch(model.config.vocab_size)
    model(input_ids=ids)
    model.lm_head = nn.Linear(64, 256, bias=False)
    model(input_ids=ids)


def test_new_parameters_are_refused_when_recompiling(checkpoint: str) -> None:
    for outcome in spawn_ranks(2, replaced_head, checkpoint, timeout=90):
        assert outcome.error == "RuntimeError", outcome
        assert "illegal path for recompilation" in outcome.message and "lm_head.weight" in outcome.message


def module_with_weights() -> dict[str, Any]:
    whole, model = build("qwen2"), build("qwen2")
    ctx = context(dist.new_group())
    ids, _ = batch(whole.config.vocab_size)
    result = parallelize_model(model, ctx, example_inputs={"input_ids": ids})
    with torch.no_grad():
        output = result(input_ids=ids, output_hidden_states=True)
        right = whole(input_ids=ids, output_hidden_states=True)
    cache = [layer.keys for layer in output.past_key_values.layers]
    return {
        "same_object": result is model,
        "differences": [
            float((a - b).abs().max())
            for a, b in zip((output.logits, *output.hidden_states), (right.logits, *right.hidden_states), strict=True)
        ],
        "whole": {type(t).__name__ for t in (output.logits, *output.hidden_states)},
        "cache": {(type(t).__name__, tuple(t.shape), tuple(t.to_local().shape)) for t in cache},
        "sharded": isinstance(next(iter(model.parameters())), ShardedTensor),
    }


def test_a_module_with_weights(ranks: Any) -> None:
    for found in ranks(2).run(module_with_weights):
        assert found["same_object"] and found["sharded"] and max(found["differences"]) < 1e-4
        assert found["whole"] == {"Tensor"}
        assert found["cache"] == {("ShardedTensor", (2, 4, 10, 8), (2, 2, 10, 8))}


def many_tokens(folder: str, **options: Any) -> tuple[int, int, list[int]]:
    """How often was compiled to warm up, and then with prompts of other lengths and 200 tokens; the tokens."""
    model, ctx = parallel(folder, **options)
    ids, _ = batch(model.config.vocab_size)
    assert paraxis.warm_up(model.eval(), batch_size=len(ids)) > 0
    warm = ctx.compile_times
    model.generate(torch.cat([ids] * 4, 1), max_new_tokens=3, do_sample=False)
    tokens = model.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=None)
    return warm, ctx.compile_times, tokens[:, ids.shape[1] :].tolist()


def test_after_warming_up_nothing_is_compiled(ranks: Any, tmp_path: Any) -> None:
    """Neither for other lengths of prompts nor while a cache grows."""
    folder = save("llama-tied", tmp_path, num_hidden_layers=1, max_position_embeddings=256)
    alone = reference(folder)
    ids, _ = batch(alone.config.vocab_size)
    expected = alone.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=None)[:, ids.shape[1] :].tolist()
    for warm, later, tokens in ranks(2).run(many_tokens, folder):
        assert 0 < warm == later and tokens == expected
    with pytest.raises(ValueError, match="at least 3"):
        paraxis.warm_up(alone, new_tokens=1)
