"""The memory that a plan promises is the memory that a rank takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from models.tiny import build, config, save

from paraxis import Plan, plan_model
from paraxis.plan.activations import Ledger, Storage
from paraxis.plan.memory import kept_tensors

BATCH, CONTEXT = 3, 20
NEAR = 0.05
"""How far the plan's figures may be from what is allocated."""


def allocated(call: Callable[[], Any]) -> int:
    """The most bytes that were allocated at a time while something ran, less what there was before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def size(tensor: Any) -> int:
    """Bytes of the memory behind a tensor, on this rank."""
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage().nbytes())


def measured_prompt(folder: str, batch: int, context: int) -> tuple[int, int, int]:
    """Bytes of parameters, of the cache after a prompt, and of all that was allocated for the prompt at most."""
    from models.compare import parallel

    from paraxis.plan.memory import held_tensors

    model, _ = parallel(folder)
    ids, held = torch.ones(batch, context, dtype=torch.long), []

    def prompt() -> None:
        with torch.no_grad():
            held.append(model(input_ids=ids, use_cache=True, logits_to_keep=1))

    prompt()  # compiles
    held.clear()
    most = allocated(prompt)
    parameters = sum(p.to_local().nbytes for p in model.parameters())
    return parameters, sum(size(t) for t in held_tensors(held[0])), most


def measured_step(folder: str, batch: int, context: int) -> tuple[int, int]:
    """Bytes of parameters, gradients and AdamW's state, and of all that a step that adds to the gradients allocates."""
    from models.compare import parallel

    model, _ = parallel(folder)
    model.train()
    ids = torch.ones(batch, context, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values() if t.dim()]
    kept = [*state, *(t for p in model.parameters() for t in (p, p.grad))]
    return sum(t.to_local().nbytes for t in kept), allocated(step)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        # every rank keeps the one head
        pytest.param("llama", {"num_key_value_heads": 1, "num_hidden_layers": 6}, marks=long),
        pytest.param("gemma2", {"sliding_window": 8}, marks=long),  # every other layer keeps a window
    ],
)
def test_of_a_generation(ranks: Any, tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    folder = save(name, tmp_path, **fields)
    memory = plan_model(folder, 2, batch=BATCH, context=CONTEXT).memory
    assert memory is not None and memory.cache is not None and memory.activations is not None
    held = ranks(2).run(measured_prompt, folder, BATCH, CONTEXT)
    assert memory.parameters == max(parameters for parameters, _, _ in held)
    assert memory.cache == pytest.approx(max(cache for _, cache, _ in held), rel=0.01)  # and some counters
    assert memory.cache + memory.activations == pytest.approx(max(most for _, _, most in held), rel=NEAR)
    assert memory.total == memory.parameters + memory.buffers + memory.cache + memory.activations
    assert memory.gradients == memory.optimizer == 0
    assert f"for {BATCH} × {CONTEXT} tokens" in str(memory) and "activations" in str(memory)


def check_training(ranks: Any, folder: str, batch: int, context: int) -> None:
    memory = plan_model(folder, 2, batch=batch, context=context, train=True).memory
    assert memory is not None and memory.activations is not None and memory.cache is None
    kept, most = max(ranks(2).run(measured_step, folder, batch, context))
    assert memory.parameters + memory.gradients + memory.optimizer == kept
    assert memory.activations == pytest.approx(most, rel=NEAR)


@long
def test_of_a_training_step(ranks: Any, tmp_path: Path) -> None:
    """Of six layers two are captured: what the others keep for the backward pass counts, too."""
    check_training(ranks, save("llama", tmp_path, num_hidden_layers=6), 2, 48)


@long
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"intermediate_size": 688, "num_key_value_heads": 4}),
        ("gpt2", {"n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 512}),  # with dropout
        ("mixtral", {"intermediate_size": 448, "num_key_value_heads": 4, "num_local_experts": 4}),
    ],
)
def test_of_larger_models(ranks: Any, tmp_path: Path, model_type: str, fields: dict[str, Any], train: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 512}
    described = AutoConfig.for_model(model_type, **({} if "n_embd" in fields else common), **fields, vocab_size=4096)
    AutoModelForCausalLM.from_config(described).save_pretrained(tmp_path)
    if train:
        check_training(ranks, str(tmp_path), 2, 256)
        return
    memory = plan_model(str(tmp_path), 2, batch=2, context=256).memory
    assert memory is not None
    parameters, _, most = max(ranks(2).run(measured_prompt, str(tmp_path), 2, 256))
    made = (memory.cache or 0) + (memory.activations or 0)
    if model_type == "mixtral":  # on a CPU its experts run one after the other, and take less than the plan says
        assert made >= most * (1 - NEAR)
        return
    assert memory.total - memory.buffers == pytest.approx(parameters + most, rel=NEAR)
    assert made == pytest.approx(most, rel=NEAR)


@long
def test_blocks_that_were_left_out_count() -> None:
    """A plan by first blocks takes what a plan of all blocks does."""
    model = config("llama", num_hidden_layers=6)
    found = [plan_model(model, 2, context=40, train=True, plan_by_blocks=blocks).memory for blocks in (True, False)]
    assert found[0] == found[1]


def test_peak_of_a_ledger() -> None:
    """The first two of three storages overlap; a block that stands for three others keeps the second."""
    kept = Storage(10, "layers.0", made=1, gone=4)
    ledger = Ledger([Storage(100, "", made=0, gone=2), kept, Storage(90, "", made=3, gone=5)], time=6)
    assert ledger.peak(Counter(), []) == 110
    assert ledger.peak(Counter({"layers.0": 3}), [kept]) == 140
    kept.gone, ledger.storages[0].size = 3, 1  # let go of before the last is made
    assert ledger.peak(Counter({"layers.0": 9}), [kept]) == 101


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
    assert "activations not known (its inputs are no token ids)" in str(memory)
    inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    found = kept_tensors(module, inputs, inputs)
    assert isinstance(found, str) and found.startswith("it does not run without memory: TypeError")
