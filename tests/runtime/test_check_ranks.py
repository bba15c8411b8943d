"""Ranks of a model that do not agree: inputs, tokens, parameters. All of them raise, and say what differs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import batch, parallel
from models.meshes import parallel_on_mesh
from torch import nn

from paraxis import RankMismatchError, check_ranks, save_state
from paraxis.tensor.sharded_tensor import ShardedTensor


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except RankMismatchError as error:
        return str(error)
    return ""


def differing_inputs(folder: str, odd: int, **options: Any) -> dict[str, str]:
    model, _ = parallel(folder, **options)
    ids, labels = batch(256)
    mine = int(dist.get_rank() == odd)
    found = {}
    with torch.no_grad():
        found["same"] = message(model, input_ids=ids, attention_mask=torch.ones_like(ids))
        found["prefill"] = message(model, ids + mine)
        mask = torch.ones_like(ids)
        mask[1, :2] = 1 - mine
        found["mask"] = message(model, input_ids=ids, attention_mask=mask)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        found["decode"] = message(model, input_ids=ids[:, :1] + mine, past_key_values=cache)
    model.train()
    found["labels"] = message(model, input_ids=ids, labels=labels.roll(mine, 1))
    found["after"] = message(model, input_ids=ids, labels=labels) + message(check_ranks, model)
    return found


@pytest.mark.parametrize(
    ("world", "odd", "options"),
    [(2, 1, {}), (4, 2, {}), pytest.param(2, 1, {"compile": "inductor"}, marks=pytest.mark.long)],
)
def test_other_inputs_on_one_rank(ranks: Any, checkpoints: Any, world: int, odd: int, options: dict[str, Any]) -> None:
    results = ranks(world).run(differing_inputs, checkpoints("llama", num_hidden_layers=1), odd, **options)
    for found in results:
        assert found.pop("same") == "" and found.pop("after") == ""
        for name, argument in {"prefill": "input_ids", "mask": "attention_mask", "decode": "input_ids"}.items():
            assert f"the values of {argument} on rank {odd} differ" in found[name]
        assert f"the values of labels on rank {odd} differ" in found["labels"]


def switched_off(folder: str) -> tuple[bool, str]:
    model, ctx = parallel(folder, check_ranks=False)
    ids, _ = batch(256)
    with torch.no_grad():
        return ctx.state.input_check is None, message(model, input_ids=ids + dist.get_rank())


def test_it_can_be_switched_off(ranks: Any, checkpoints: Any) -> None:
    assert ranks(2).run(switched_off, checkpoints("llama", num_hidden_layers=1)) == [(True, "")] * 2


def on_a_mesh(folder: str) -> tuple[str, str, str]:
    """Data-parallel ranks have other inputs, and that is right; tensor-parallel ones must not."""
    model, ctx = parallel_on_mesh(folder, 2, 2)
    ids, _ = batch(256)
    with torch.no_grad():
        same = message(model, input_ids=ids + ctx.dp_rank) + message(check_ranks, model)
        other = message(model, input_ids=ids + ctx.rank)
    parameter = next(p for p in model.parameters() if isinstance(p, ShardedTensor))
    if ctx.dp_rank == 1:
        parameter.local.add_(1)
    return same, other, message(check_ranks, model)


def test_data_parallel_ranks_may_have_other_inputs(ranks: Any, checkpoints: Any) -> None:
    results = ranks(4).run(on_a_mesh, checkpoints("llama", num_hidden_layers=1))
    for rank, (same, other, parameters) in enumerate(results):
        assert same == "" and f"input_ids on rank {rank // 2 * 2 + 1} differ" in other
        assert "embed_tokens.weight of rank 2 is not that of rank 0" in parameters


def another_model_after_an_error(folder: str) -> tuple[str, str]:
    """A model that raised is still there while another one waits for a rank that comes late."""
    (first, _), (second, _) = parallel(folder), parallel(folder)
    ids, _ = batch(256)
    with torch.no_grad():
        second(input_ids=ids)
        raised = message(first, input_ids=ids + dist.get_rank())
        if dist.get_rank() == 1:
            time.sleep(2.0)
        return raised, message(second, input_ids=ids)


def test_an_error_of_one_model_is_not_raised_by_another(ranks: Any, checkpoints: Any) -> None:
    for raised, other in ranks(2).run(another_model_after_an_error, checkpoints("llama", num_hidden_layers=1)):
        assert "the values of input_ids on rank 1 differ" in raised and other == ""


class Breaks(nn.Module):
    """Two graphs, with Python code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y.relu()) * scale


def with_graph_breaks() -> list[str]:
    from models.compare import parallel_module

    model, _, _ = parallel_module(Breaks, torch.ones(2, 8))
    rank = dist.get_rank()
    with torch.no_grad():
        found = [message(model, torch.ones(2, 8)), message(model, torch.ones(2, 8) * (1 + rank))]
        return [*found, message(model, torch.ones(2, 8), scale=1.0 + rank)]


def test_models_with_graph_breaks(ranks: Any) -> None:
    for same, values, plain in ranks(2).run(with_graph_breaks):
        assert same == "" and "the values of x on rank 1 differ" in values
        assert "scale differs: 1.0 on rank 0, 2.0 on rank 1" in plain


def changed_parameters(folder: str, target: str) -> dict[str, str]:
    model, _ = parallel(folder)
    mine = dist.get_rank() == 1
    norm = model.model.norm.weight
    found = {"same": message(check_ranks, model)}
    before = norm.local.clone()
    if mine:
        norm.local[3] += 1
    found["on demand"] = message(check_ranks, model)
    found["saving"] = message(model.save_pretrained, target)
    found["state"] = message(save_state, target + "-state", model)
    norm.local.copy_(before)
    if mine:
        norm.local[3] += 1e-6
    with pytest.warns(UserWarning, match="rounding") if not mine else _nothing():
        found["rounding"] = message(model.save_pretrained, target)
    norm.local.copy_(before)
    if mine:
        model.model.rotary_emb.inv_freq.mul_(2)
    found["buffer"] = message(check_ranks, model)
    if mine:
        model.model.rotary_emb.inv_freq.div_(2)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.local.mul_(2)
    found["shard"] = message(check_ranks, model)
    return found


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_parameters_changed_on_one_rank(ranks: Any, checkpoints: Any, tmp_path: Any) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for found in ranks(2).run(changed_parameters, folder, str(tmp_path / "saved")):
        assert found["same"] == found["rounding"] == ""
        for name in ("on demand", "saving", "state"):
            assert "model.norm.weight of rank 1 is not that of rank 0" in found[name]
        assert "rotary_emb.inv_freq of rank 1" in found["buffer"]
        assert "down_proj.weight" in found["shard"] and "writes by rank: 0, 1" in found["shard"]


def test_a_model_that_is_not_parallel_is_refused() -> None:
    with pytest.raises(TypeError, match="not a parallel model"):
        check_ranks(nn.Linear(2, 2))
