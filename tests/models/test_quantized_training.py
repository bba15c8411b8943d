"""QLoRA: adapters on quantized models train as they do on the unsharded model with the dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.quantized import write
from models.quantized_formats import CASES
from torch import nn

import paraxis
from ranks import RankPool

peft = pytest.importorskip("peft")

IDS = torch.arange(28).view(2, 14) * 3 % 117 + 3
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def with_adapters(model: Any) -> Any:
    """The model with LoRA on attention and MLP, the same on every rank."""
    torch.manual_seed(5)
    options = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    return model.train()


def train(model: Any, steps: int) -> list[float]:
    """The losses of AdamW steps on the adapters."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resumed(folder: str, state: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """On a rank: logits after training, those of a new model with the saved state, and what torch's own saving says."""

    def adapted() -> Any:
        ctx = paraxis.ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
        return with_adapters(paraxis.parallelize_model(folder, ctx, show_progress=False))

    model = adapted()
    train(model, 1)
    paraxis.save_state(state, model, None, step=1)
    again = adapted()
    assert paraxis.load_state(state, again) == {"step": 1}
    with pytest.raises(RuntimeError, match="a quantized weight cannot be pickled") as error:
        torch.save(next(p.local for p in model.parameters() if _encoded(p)), state + ".pt")
    with torch.no_grad():
        return model.eval()(IDS).logits, again.eval()(IDS).logits, str(error.value)


def trained(folder: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    """On a rank: the losses, the adapters, and what is trained."""
    ctx = paraxis.ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    model = with_adapters(paraxis.parallelize_model(folder, ctx, show_progress=False))
    before = {n: p.local.parts.codes.clone() for n, p in model.named_parameters() if _encoded(p)}
    losses = train(model, steps)
    after = {n: p.local.parts.codes for n, p in model.named_parameters() if _encoded(p)}
    assert before and all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    adapters = {n: _full(p) for n, p in model.named_parameters() if "lora_" in n}
    return losses, adapters, {n for n, p in model.named_parameters() if p.requires_grad}


def _encoded(parameter: Any) -> bool:
    return getattr(getattr(parameter, "spec", None), "quantized", None) is not None


def _full(parameter: Any) -> torch.Tensor:
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().clone()  # type: ignore[no-any-return]


def check(pool: RankPool, case: str, folder: Path, steps: int) -> None:
    """Train on ranks and unsharded, and compare."""
    each = CASES[case]
    reference = write("dense", folder, each.format, each.config, each.dequantize, **each.overrides)
    reference.requires_grad_(False)
    model = with_adapters(reference)
    losses = train(model, steps)
    expected = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    assert losses[-1] < losses[0] - 0.1
    for found, adapters, names in pool.run(trained, str(folder), steps, timeout=600):
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-4
        assert names == set(expected) == set(adapters)
        for name, adapter in expected.items():
            assert float((adapters[name] - adapter).norm() / adapter.norm()) < 1e-2, name


def test_adapters_on_nf4_train_as_unsharded(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    check(ranks(2), "bnb-nf4", tmp_path, 3)


def test_a_training_run_is_resumed(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    each = CASES["ct-int4"]
    write("dense", tmp_path, each.format, each.config, each.dequantize, num_hidden_layers=1)
    for before, after, _ in ranks(2).run(resumed, str(tmp_path), str(tmp_path / "state"), timeout=600):
        assert torch.equal(before, after)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", ["bnb-nf4-nested", "fp8-blocks", "ct-int4", "gptq-ordered"])
def test_twenty_steps(case: str, world: int, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    check(ranks(world), case, tmp_path, 20)
