"""``parallelize_model`` on modules and checkpoints: same object and class, weights from a seed, options it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import batch, context, max_difference, parallel, reference
from models.tiny import build
from torch import nn

from paraxis import ParallelExecutionCtx, parallelize_model
from paraxis.tensor.sharded_tensor import ShardedTensor


def parallelize_module_with_weights() -> dict[str, Any]:
    """A transformers model that is passed as a module, over a new group."""
    unsharded, model = build("qwen2"), build("qwen2")
    ids, _ = batch(unsharded.config.vocab_size)
    result = parallelize_model(model, context(dist.new_group()), example_inputs={"input_ids": ids})
    with torch.no_grad():
        output = result(input_ids=ids, output_hidden_states=True)
        right = unsharded(input_ids=ids, output_hidden_states=True)
    found, expected = (output.logits, *output.hidden_states), (right.logits, *right.hidden_states)
    keys = [layer.keys for layer in output.past_key_values.layers]
    return {
        "same_object": result is model,
        "differences": list(map(max_difference, found, expected)),
        "outputs": {type(t).__name__ for t in found},
        "cache": {(type(t).__name__, tuple(t.shape), tuple(t.to_local().shape)) for t in keys},
        "sharded": all(isinstance(p, ShardedTensor) for p in model.parameters()),
    }


def test_module_keeps_its_weights_and_is_returned(ranks: Any) -> None:
    for found in ranks(2).run(parallelize_module_with_weights):
        assert found["same_object"] and found["sharded"] and max(found["differences"]) < 1e-4
        assert found["outputs"] == {"Tensor"}, "what the model returns is gathered"
        assert found["cache"] == {("ShardedTensor", (2, 4, 10, 8), (2, 2, 10, 8))}, "the KV cache stays sharded"


def initialize_from_a_seed(folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and weights of a model whose checkpoint is not loaded."""
    torch.manual_seed(3)
    model, _ = parallel(folder, skip_load_weights=True, weight_init_fn=partial(nn.init.normal_, std=0.1))
    ids, _ = batch(model.config.vocab_size)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return logits, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def test_same_seed_gives_the_same_weights_on_any_number_of_ranks(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("gpt2")
    runs = {world: ranks(world).run(initialize_from_a_seed, folder) for world in (1, 4)}
    logits, weights = runs[1][0]
    assert logits.std() > 1e-3
    for results in runs.values():
        for other, values in results:
            assert (other - logits).abs().max() < 1e-4
            assert all(torch.equal(values[n], weights[n]) for n in weights)


def load_with_options(folder: str) -> dict[str, Any]:
    """A model with another dtype, a field of its configuration, and the generation config of the checkpoint."""
    model, ctx = parallel(folder, torch_dtype=torch.bfloat16, num_hidden_layers=1)
    errors = []
    for options in ({"no_such_option": 1}, {"constraints": {"nothing": "row"}}):
        with pytest.raises((TypeError, ValueError)) as caught:
            parallelize_model(nn.Linear(8, 8), context(), example_inputs=torch.ones(2, 8), **options)
        errors.append(str(caught.value))
    return {
        "dtype": {p.dtype for p in model.parameters()},
        "layers": len(model.model.layers),
        "generation": model.generation_config.eos_token_id,
        "timings": {"capture", "load"} & set(ctx.timings),
        "planned": ctx.plan is not None and not ctx.state.planning,
        "errors": errors,
    }


def test_options_reach_config_and_constructor_and_unknown_ones_are_refused(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama")
    for rank, found in enumerate(ranks(2).run(load_with_options, folder)):
        assert found["dtype"] == {torch.bfloat16} and found["layers"] == 1 and found["planned"]
        assert found["generation"] == reference(folder).generation_config.eos_token_id
        assert found["timings"] == ({"capture", "load"} if rank == 0 else {"load"}), "rank 0 plans for all"
        assert "no_such_option" in found["errors"][0] and "nothing" in found["errors"][1]


def test_missing_process_group_is_an_error() -> None:
    ctx = ParallelExecutionCtx(current_device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="torchrun"):
        parallelize_model(nn.Linear(4, 4), ctx, example_inputs=torch.ones(1, 4))
