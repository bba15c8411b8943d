"""The memory that a plan promises is the memory that a rank takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import build, save

from paraxis import Plan, plan_model
from paraxis.memory import kept_tensors

BATCH, CONTEXT = 3, 20


def measured(folder: str) -> tuple[int, int]:
    """Bytes of parameters and of the cache on this rank, after a prompt."""
    from models.compare import parallel

    from paraxis.memory import held_tensors

    model, _ = parallel(folder)
    with torch.no_grad():
        output = model(input_ids=torch.ones(BATCH, CONTEXT, dtype=torch.long), use_cache=True)
    cache = [t.to_local() if hasattr(t, "to_local") else t for t in held_tensors(output)]
    parameters = [p.to_local() for p in model.parameters()]
    return tuple(sum(t.numel() * t.element_size() for t in each) for each in (parameters, cache))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"num_key_value_heads": 1}),  # every rank keeps the one head
        ("gemma2", {"sliding_window": 8}),  # every other layer keeps a window
    ],
)
def test_of_a_generation(ranks: Any, tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    folder = save(name, tmp_path, **fields)
    memory = plan_model(folder, 2, batch=BATCH, context=CONTEXT).memory
    assert memory is not None and memory.cache is not None
    held = ranks(2).run(measured, folder)
    assert memory.parameters == max(parameters for parameters, _ in held)
    assert memory.cache == pytest.approx(max(cache for _, cache in held), rel=0.01)  # and some counters
    assert memory.total == memory.parameters + memory.buffers + memory.cache
    assert memory.gradients == memory.optimizer == 0


def test_of_training(tmp_path: Path) -> None:
    plan = plan_model(build("gpt2"), 4, train=True)
    memory = plan.memory
    assert memory is not None and memory.gradients == memory.parameters and memory.optimizer == 2 * memory.gradients
    assert "gradients" in str(memory) and "AdamW" in str(memory) and "without activations" in str(memory)
    plan.save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")).memory == memory


def test_of_a_module_that_keeps_nothing() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    memory = plan_model(module, 2, example_inputs=torch.zeros(2, 8), context=8).memory
    assert memory is not None and memory.cache is None and memory.total == memory.parameters + memory.buffers
    assert "cache not known (its inputs are no token ids)" in str(memory)
    found = kept_tensors(module, {"input_ids": torch.zeros(2, 8, dtype=torch.long)}, 2, 8)
    assert isinstance(found, str) and found.startswith("it does not run without memory: TypeError")
