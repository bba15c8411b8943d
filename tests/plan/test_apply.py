"""Applying a plan: a saved one runs the model as a searched one does, and one that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import max_difference, parallel, same_tokens
from zoo.cases import find
from zoo.check import differences, run

from paraxis import Plan, plan_model


def run_by_plan(name: str, folder: str, plan: str) -> dict[str, Any]:
    """Errors of outputs and hidden states, tokens, and the plan afterwards."""
    model, ctx = parallel(folder, plan=plan)
    assert "capture" not in ctx.timings  # nothing was planned
    placed = {n: str(p.meta_info.placement) for n, p in model.named_parameters()}
    unsharded = type(model).from_pretrained(folder).eval()
    inputs = find(name).inputs(unsharded)
    error = differences(run(model, inputs), run(unsharded, inputs))
    ids = inputs["input_ids"][:1]
    tokens = same_tokens(model, unsharded, ids, 6)
    plan_after = ctx.plan.to_json()
    with torch.no_grad():
        states = [m(ids, output_hidden_states=True).hidden_states[1] for m in (model, unsharded)]
    error = max(error, max_difference(*states))
    return {
        "error": error,
        "placed": placed,
        "tokens": tokens,
        "plan": plan_after,
        "breaks": list(ctx.plan.breaks),
    }


@pytest.mark.parametrize("name", ["gpt2"])
def test_the_model_runs_by_a_saved_plan(ranks: Any, tmp_path: Path, name: str) -> None:
    find(name).make().save_pretrained(tmp_path)  # type: ignore[operator]
    plan = plan_model(tmp_path, 2)
    plan.save(str(tmp_path / "plan.json"))
    for found in ranks(2).run(run_by_plan, name, str(tmp_path), str(tmp_path / "plan.json")):
        assert found["error"] < 1e-4 and found["tokens"] and not found["breaks"]
        assert found["placed"] == {n: str(plan.parameters[n].placement) for n in found["placed"]}
        assert Plan.from_json(found["plan"]) == plan


def refused(folder: str, plan: str) -> str:
    """The error of this rank."""
    with pytest.raises(ValueError) as caught:
        parallel(folder, plan=plan)
    return str(caught.value)


def test_plans_that_do_not_fit_are_refused(ranks: Any, tmp_path: Path) -> None:
    find("llama").make().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    plan = plan_model(tmp_path / "model", 2).to_json()
    name = "model.layers.1.mlp.up_proj.weight"
    others: dict[str, tuple[Any, str]] = {
        "four": (plan_model(tmp_path / "model", 4).to_json(), "it is for 4 ranks, and there are 2"),
        "less": ({**plan, "parameters": {k: v for k, v in plan["parameters"].items() if k != name}}, f"{name}: not in"),
        "shape": (json.loads(json.dumps(plan)), f"{name}: of shape (8, 8) in the plan, ("),
        "broken": ([1, 2], "is not a plan"),
    }
    others["shape"][0]["parameters"][name]["global_shape"] = [8, 8]
    for kind, (data, message) in others.items():
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(data))
        assert all(message in error for error in ranks(2).run(refused, str(tmp_path / "model"), str(path))), kind


def test_ranks_with_different_plans_are_refused(ranks: Any, tmp_path: Path) -> None:
    find("llama").make().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    plan_model(tmp_path / "model", 2).save(str(tmp_path / "plan_0.json"))
    plan_model(tmp_path / "model", 2, constraints={"lm_head": "replicated"}).save(str(tmp_path / "plan_1.json"))
    errors = ranks(2).run(refused_by_rank, str(tmp_path))
    assert all("rank 1 was passed another plan than rank 0" in error for error in errors)


def refused_by_rank(folder: str) -> str:
    """The error of a rank with a plan that others do not have."""
    return refused(f"{folder}/model", f"{folder}/plan_{torch.distributed.get_rank()}.json")
