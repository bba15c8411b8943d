"""LoRA adapters on a parallel model, added before it is parallelized or after."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.allocations import Allocations
from models.compare import batch, context, full, gradient_errors, reference
from models.tiny import save
from torch import nn

from paraxis import parallelize_model
from paraxis.integrations.peft import save_adapters

peft = pytest.importorskip("peft")

TARGETS = {"llama": ["q_proj", "v_proj", "o_proj", "down_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"]}
STEPS = 3


def tiny(name: str, folder: Path) -> str:
    return save(name, folder, **{"num_hidden_layers" if name == "llama" else "n_layer": 1})


def lora(name: str, dropout: float = 0.0, **options: Any) -> Any:
    return peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=TARGETS[name],
        lora_dropout=dropout,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
        **options,
    )


def with_adapters(model: Any, name: str, seed: int = 5, **options: Any) -> Any:
    """The model with random adapters: freshly initialized ones are the identity."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, lora(name, **options))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(folder: str, name: str, order: str, **options: Any) -> tuple[Any, Any]:
    """(parallel, its context)"""
    ctx, plain = context(), reference(folder)
    if order == "before":
        return parallelize_model(with_adapters(plain, name, **options), ctx, show_progress=False), ctx
    # After: every rank initializes different adapters, and rank 0's are used.
    model = parallelize_model(plain, ctx, show_progress=False)
    return with_adapters(model, name, seed=5 + dist.get_rank(), **options), ctx


def train(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains(folder: str, name: str, order: str, target: str) -> dict[str, Any]:
    """Train the adapters beside the unsharded model and save them; the results of the parallel model."""
    model, ctx = adapted(folder, name, order)
    right = with_adapters(reference(folder), name)
    ids, labels = batch(256)
    losses, expected = train(model, ids, labels), train(right, ids, labels)
    errors = {
        key: float((full(p) - q).detach().norm() / q.norm().clamp(min=1e-6))
        for (key, p), (_, q) in zip(model.named_parameters(), right.named_parameters(), strict=True)
    }
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    model.save_pretrained(target)
    dist.barrier()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    if order == "before":  # a copy has its own weights, adapters too
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            assert (copied(input_ids=ids).logits - logits).abs().max() < 1e-5
            assert torch.equal(copied.generate(input_ids=ids, max_new_tokens=4, do_sample=False), tokens)
    kinds = {type(p).__name__ for key, p in model.named_parameters() if "lora_" in key}
    reasons = {reason for key, reason in ctx.plan.replicated if "lora_" in key}
    return {
        "losses": [losses, expected],
        "errors": errors,
        "trained": trained,
        "logits": logits,
        "tokens": tokens,
        "kinds": kinds,
        "reasons": reasons,
    }


def check_trained(results: list[dict[str, Any]], folder: str, target: str) -> None:
    """Against the unsharded run, and the saved adapters in plain PEFT."""
    plain = peft.PeftModel.from_pretrained(reference(folder), target).eval()
    ids, _ = batch(256)
    with torch.no_grad():
        logits = plain(input_ids=ids).logits
        tokens = plain.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        base = reference(folder)(input_ids=ids).logits
    assert (logits - base).abs().max() > 1e-2, "the adapters do something"
    for found in results:
        losses, expected = found["losses"]
        assert losses == pytest.approx(expected, abs=1e-4) and losses[-1] < losses[0]
        assert found["trained"] and all("lora_" in key for key in found["trained"])
        assert max(found["errors"].values()) < 1e-3, found["errors"]
        assert (found["logits"] - logits).abs().max() < 1e-4
        assert torch.equal(found["tokens"], tokens)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_adapters_added_before_parallelizing(ranks: Any, tmp_path: Path, name: str) -> None:
    folder, target = tiny(name, tmp_path / "model"), str(tmp_path / "adapter")
    results = ranks(2).run(trains, folder, name, "before", target)
    check_trained(results, folder, target)
    assert results[0]["kinds"] == {"ShardedTensor"}


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_adapters_added_after_parallelizing(ranks: Any, tmp_path: Path, name: str) -> None:
    folder, target = tiny(name, tmp_path / "model"), str(tmp_path / "adapter")
    results = ranks(2).run(trains, folder, name, "after", target)
    check_trained(results, folder, target)
    assert results[0]["kinds"] == {"Parameter"}
    assert all("added after the plan" in reason for reason in results[0]["reasons"]) and results[0]["reasons"]


def loads(folder: str, adapter: str) -> list[torch.Tensor]:
    """Logits without the adapter, with it, disabled, merged, unmerged, and merged for good."""
    model = parallelize_model(reference(folder), context(), show_progress=False)
    ids, _ = batch(256)
    with torch.no_grad():
        found = [model(input_ids=ids).logits]
        adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
        found.append(adapted(input_ids=ids).logits)
        with adapted.disable_adapter():
            found.append(adapted(input_ids=ids).logits)
        adapted.merge_adapter()
        found.append(adapted(input_ids=ids).logits)
        adapted.unmerge_adapter()
        found.append(adapted(input_ids=ids).logits)
        merged = adapted.merge_and_unload()
        found.append(merged(input_ids=ids).logits)
        assert not any("lora" in key for key, _ in merged.named_parameters())
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_of_an_unsharded_model_load_merge_and_unload(ranks: Any, tmp_path: Path, name: str) -> None:
    folder = tiny(name, tmp_path / "model")
    plain = with_adapters(reference(folder), name).eval()
    plain.save_pretrained(tmp_path / "adapter")
    ids, _ = batch(256)
    with torch.no_grad():
        base, right = reference(folder)(input_ids=ids).logits, plain(input_ids=ids).logits
    assert (right - base).abs().max() > 1e-2
    for found in ranks(2).run(loads, folder, str(tmp_path / "adapter")):
        for logits, expected in zip(found, (base, right, base, right, right, right), strict=True):
            assert (logits - expected).abs().max() < 1e-4


def compiled(folder: str) -> list[torch.Tensor]:
    """A compiled model that runs, gets adapters, and runs again."""
    model = parallelize_model(reference(folder), context(), show_progress=False, compile="inductor")
    ids, _ = batch(256)
    with torch.no_grad():
        return [model(input_ids=ids).logits, with_adapters(model, "llama").eval()(input_ids=ids).logits]


@pytest.mark.long
def test_adapters_on_a_compiled_model(ranks: Any, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    ids, _ = batch(256)
    with torch.no_grad():
        base = reference(folder)(input_ids=ids).logits
        right = with_adapters(reference(folder), "llama").eval()(input_ids=ids).logits
    assert (right - base).abs().max() > 1e-2
    for found in ranks(2).run(compiled, folder, timeout=280):
        for logits, expected in zip(found, (base, right), strict=True):
            assert (logits - expected).abs().max() < 1e-4


def drops(folder: str) -> list[Any]:
    """Losses with dropout on the adapters, and their gradients: ranks draw the same numbers for replicated tensors."""
    found = []
    for order in ("before", "after"):
        model, _ = adapted(folder, "llama", order, dropout=0.5)
        model.train()
        ids, labels = batch(256)
        torch.manual_seed(dist.get_rank())
        losses = [model(input_ids=ids, labels=labels).loss for _ in range(2)]
        losses[0].backward()
        gradients = [full(p.grad) for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            model.eval()
            found.append([losses[0].detach(), losses[1].detach(), model(input_ids=ids, labels=labels).loss, *gradients])
    return found


@pytest.mark.long
def test_dropout_on_adapters_is_the_same_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    ids, labels = batch(256)
    with torch.no_grad():
        right = with_adapters(reference(folder), "llama", dropout=0.5).eval()(input_ids=ids, labels=labels).loss
    first, second = ranks(2).run(drops, folder)
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "the ranks differ"
        assert ours[0] != ours[1] and ours[0] != ours[2], "dropout does nothing"
        assert abs(ours[2] - right) < 1e-5, "no dropout in evaluation"


def saves_modules(folder: str, order: str, target: str) -> torch.Tensor:
    """A head that is trained too: PEFT copies the sharded module."""
    model, ctx = adapted(folder, "llama", order, modules_to_save=["lm_head"])
    ids, labels = batch(256)
    train(model, ids, labels)
    if order == "before":
        model.save_pretrained(target)
    else:  # PEFT saves plain tensors only
        save_adapters(model, ctx, target)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.long
@pytest.mark.parametrize("order", ["before", "after"])
def test_modules_to_save(ranks: Any, tmp_path: Path, order: str) -> None:
    folder, target = tiny("llama", tmp_path / "model"), str(tmp_path / "adapter")
    right = with_adapters(reference(folder), "llama", modules_to_save=["lm_head"])
    ids, labels = batch(256)
    train(right, ids, labels)
    results = ranks(2).run(saves_modules, folder, order, target)
    plain = peft.PeftModel.from_pretrained(reference(folder), target).eval()
    with torch.no_grad():
        expected, saved = right.eval()(input_ids=ids).logits, plain(input_ids=ids).logits
    for logits in results:
        assert (logits - expected).abs().max() < 1e-3 and (logits - saved).abs().max() < 1e-4


# -- gradient checkpointing ----------------------------------------------------------------------------------------


def checkpointed(model: Any, reentrant: bool | None, enabled: bool = True) -> Any:
    """The usual recipe for adapters on a large model."""
    if enabled:
        options = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        model.gradient_checkpointing_enable(**options)
        model.enable_input_require_grads()
    return model.train()


def trained_with_checkpointing(
    folder: str, order: str, reentrant: bool | None, enabled: bool, **options: Any
) -> dict[str, Any]:
    """Errors against the unsharded model, which has the same adapters; what each of them saves for the backward."""
    torch._dynamo.reset()
    ctx, right = context(), checkpointed(with_adapters(reference(folder), "llama"), reentrant, enabled)
    if order == "enabled before":
        model = checkpointed(with_adapters(reference(folder), "llama"), reentrant, enabled)
        model = parallelize_model(model, ctx, show_progress=False).train()
    elif order == "before":
        model = parallelize_model(with_adapters(reference(folder, **options), "llama"), ctx, show_progress=False)
        model = checkpointed(model, reentrant, enabled)
    else:
        model = parallelize_model(folder, ctx, show_progress=False, **options)
        model = checkpointed(with_adapters(model, "llama"), reentrant, enabled)
    ids, labels = batch(256, length=48)
    model(input_ids=ids, labels=labels)
    graphs, saved, peaks = ctx.compile_times, [], []
    for each in (model, right):
        with Allocations() as allocations:
            loss = each(input_ids=ids, labels=labels).loss
            saved.append(allocations.live)
            loss.backward()
        peaks.append(allocations.peak)
    errors = gradient_errors(model, right)
    trained = [key for key, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in key and dict(model.named_parameters())[key].grad is not None for key in trained)
    for each in (model, right):
        each.zero_grad()
    return {
        "gradients": max(errors.values()),
        "losses": [train(each, ids, labels) for each in (model, right)],
        "saved": saved,
        "peaks": peaks,
        "graphs": graphs,
        "breaks": ctx.plan.breaks,
    }


def with_and_without_checkpointing(folder: str, order: str, reentrant: bool | None) -> list[dict[str, Any]]:
    return [trained_with_checkpointing(folder, order, reentrant, enabled) for enabled in (True, False)]


@pytest.mark.parametrize(
    ("order", "reentrant"),
    [
        ("before", True),
        ("after", None),
        pytest.param("enabled before", None, marks=pytest.mark.long),
        pytest.param("before", False, marks=pytest.mark.long),
        pytest.param("after", True, marks=pytest.mark.long),
    ],
)
def test_gradient_checkpointing_is_one_graph_and_saves_memory(
    ranks: Any, checkpoints: Any, order: str, reentrant: bool | None
) -> None:
    folder = checkpoints("llama", num_hidden_layers=6)  # so that activations of blocks outweigh those of the head
    for found, without in ranks(2).run(with_and_without_checkpointing, folder, order, reentrant):
        assert found["breaks"] == () and found["graphs"] == 1
        assert found["gradients"] < 1e-4
        losses, expected = found["losses"]
        assert losses == pytest.approx(expected, abs=1e-4) and losses[-1] < losses[0]
        for what in ("saved", "peaks"):
            (ours, theirs), (before, theirs_before) = found[what], without[what]
            assert ours / before < theirs / theirs_before + 0.1, f"{what} shrink less than unsharded"


def with_attention(folder: str, order: str, implementation: str) -> dict[str, Any]:
    return trained_with_checkpointing(folder, order, None, True, attn_implementation=implementation)


@pytest.mark.parametrize(
    ("order", "implementation"),
    [
        ("after", "flex_attention"),
        pytest.param("before", "flex_attention", marks=pytest.mark.long),
        pytest.param("before", "eager", marks=pytest.mark.long),
        pytest.param("after", "eager", marks=pytest.mark.long),
    ],
)
def test_gradient_checkpointing_with_another_attention(
    ranks: Any, checkpoints: Any, order: str, implementation: str
) -> None:
    for found in ranks(2).run(with_attention, checkpoints("llama"), order, implementation):
        assert found["breaks"] == () and found["graphs"] == 1
        assert found["gradients"] < 1e-4
        losses, expected = found["losses"]
        assert losses == pytest.approx(expected, abs=1e-4) and losses[-1] < losses[0]
