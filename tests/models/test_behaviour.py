"""Using a parallel model as a plain one: generation, training, saving, converting, modules of one's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from models.compare import batch, context, gradient_errors, parallel, reference
from models.tiny import build, save
from torch import nn
from torch.fx import GraphModule

from paraxis import parallelize_model
from paraxis.passes import ParallelLayerReplacePass, PassBase, build_parallel_pass_pipeline
from ranks import spawn_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-tied", tmp_path_factory.mktemp("llama"))


def sampled(folder: str) -> Any:
    """Ranks whose random states differ."""
    model, _ = parallel(folder)
    ids, _ = batch(model.config.vocab_size)
    torch.manual_seed(10 + dist.get_rank())
    drawn = model.generate(ids, max_new_tokens=8, do_sample=True)
    unsharded = reference(folder)
    torch.manual_seed(10)
    return drawn, unsharded.generate(ids, max_new_tokens=8, do_sample=True)


def test_sampling_agrees_on_all_ranks(checkpoint: str, ranks: Any) -> None:
    (first, expected), (second, _) = ranks(2).run(sampled, checkpoint)
    assert torch.equal(first, second) and torch.equal(first, expected)


def trained(folder: str) -> dict[str, Any]:
    """A few steps of AdamW with accumulation and clipping, beside the unsharded model."""
    model, _ = parallel(folder)
    unsharded = reference(folder)
    ids, labels = batch(256)
    losses = []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, unsharded)]
    for _ in range(3):
        for m, optimizer in zip((model, unsharded), optimizers, strict=True):
            m.train()
            for part in range(2):
                loss = m(input_ids=ids[part : part + 1], labels=labels[part : part + 1]).loss
                loss.backward()
                losses.append(loss.item())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(unsharded.named_parameters())
    errors = {
        n: float((p.full_tensor() - weights[n]).detach().norm() / weights[n].norm())
        for n, p in model.named_parameters()
    }
    return {"losses": losses, "weights": errors}


@long
def test_training_follows_the_unsharded_model(checkpoint: str, ranks: Any) -> None:
    for found in ranks(2).run(trained, checkpoint):
        losses = torch.tensor(found["losses"]).view(3, 2, 2)  # step, model, part
        assert (losses[:, 0] - losses[:, 1]).abs().max() < 1e-4
        assert losses[-1, 0].mean() < losses[0, 0].mean()
        assert max(found["weights"].values()) < 1e-3


def dropped(folder: str) -> list[Any]:
    """Dropout on: what is replicated must stay so although the ranks are seeded apart."""
    torch.manual_seed(dist.get_rank())
    model, _ = parallel(folder, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    model.train()
    ids, labels = batch(256)
    losses = [model(input_ids=ids, labels=labels).loss for _ in range(2)]
    losses[0].backward()
    return [*(x.detach() for x in losses), model.transformer.ln_f.weight.grad.to_local()]


def test_dropout_agrees_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(dropped, save("gpt2", tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0] != first[1], "dropout does nothing"


def checkpointed(folder: str) -> dict[str, float]:
    model, _ = parallel(folder)
    unsharded = reference(folder)
    ids, labels = batch(256)
    model.train()
    model.gradient_checkpointing_enable()
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    unsharded(input_ids=ids, labels=labels).loss.backward()
    return gradient_errors(model, unsharded)


def test_gradients_with_activation_checkpointing(checkpoint: str, ranks: Any) -> None:
    for errors in ranks(2).run(checkpointed, checkpoint):
        assert max(errors.values()) < 1e-3


def converted(folder: str) -> None:
    model, _ = parallel(folder)
    assert model.to("cpu") is model and model.float() is model
    model.half()


@long
def test_a_conversion_says_what_to_do(checkpoint: str) -> None:
    for outcome in spawn_ranks(2, converted, checkpoint, timeout=90):
        assert outcome.error == "RuntimeError" and "torch_dtype" in outcome.message, outcome


class Einsum(nn.Module):
    """Attention written with einsum, a convolution, a tied pair and an operator without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.out, self.mix = nn.Linear(32, 32), nn.Conv1d(32, 32, 3, padding=1)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = (f(x).unflatten(-1, (4, 8)) for f in (self.q, self.k, self.v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        y = self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))
        return {"y": self.mix(y.mT).mT, "z": torch.linalg.qr(self.q(y)).R.abs()}


class Unordered(nn.Module):
    """Goes through a set of strings, whose order is another one in every process."""

    NAMES = tuple(["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"])

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        for i, name in enumerate(self.NAMES):
            self.register_buffer(name, torch.full((32,), float(i)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = {name: x * getattr(self, name) for name in set(self.NAMES)}
        return self.down(self.up(sum(parts[name] for name in self.NAMES)).relu())


def own_module(make: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, whole = make(), make()
    whole.load_state_dict(model.state_dict())
    x = torch.randn(2, 6, 32)
    ctx = context()
    parallelize_model(model, ctx, example_inputs=x)
    result, right = model(x), whole(x)
    pairs = [(result[k], right[k]) for k in right] if isinstance(right, dict) else [(result, right)]
    sum(a.sum() for a, _ in pairs).backward()
    sum(b.sum() for _, b in pairs).backward()
    return {
        "differences": [float((a - b).abs().max()) for a, b in pairs],
        "gradients": gradient_errors(model, whole),
        "gathered": ctx.plan.gathered,
        "replicated": dict(ctx.plan.replicated),
        "unplanned": {name: ctx.plan.parameters[name].local_shape for name in ctx.plan.unplanned},
    }


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 3))


def test_modules_of_ones_own(ranks: Any) -> None:
    for found in ranks(2).run(own_module, mlp):
        assert max(found["differences"]) < 1e-5 and max(found["gradients"].values()) < 1e-4
    for found in ranks(2).run(own_module, Unordered):
        assert max(found["differences"]) < 1e-4 and max(found["gradients"].values()) < 1e-4
    for found in ranks(2).run(own_module, Einsum):
        assert max(found["differences"]) < 1e-4 and max(found["gradients"].values()) < 1e-3
        assert any("qr" in reason for _, reason in found["gathered"]), found["gathered"]
        assert found["unplanned"] == {"unused.weight": (2, 4), "unused.bias": (4,)}, "split for memory"
        assert "not used" in found["replicated"]["unused.bias"]


class CountCollectives(PassBase):
    """A pass of the user's own, on the local program."""

    def run(self, graph_module: GraphModule, ctx: Any, config: Any) -> GraphModule:
        names = [n.name for n in graph_module.graph.nodes if n.op == "call_function"]
        ctx.seen = [*getattr(ctx, "seen", []), sum(name.startswith("all_reduce") for name in names)]
        return graph_module


def with_own_pass(folder: str) -> list[int]:
    pipeline = build_parallel_pass_pipeline()
    pipeline.insert_after(ParallelLayerReplacePass, CountCollectives())
    model, ctx = parallel(folder, pipeline=pipeline)
    with torch.no_grad():
        model(input_ids=batch(256)[0])
    return ctx.seen


def test_a_pass_of_ones_own(checkpoint: str, ranks: Any) -> None:
    assert ranks(2).run(with_own_pass, checkpoint) == [[5, 5]] * 2  # planned, then compiled


def cached(name: str, layers: int) -> dict[str, Any]:
    """Attentions, hidden states and caches of a call."""
    model, whole = (build(name, num_hidden_layers=layers, attn_implementation="eager") for _ in range(2))
    parallelize_model(model, context())
    ids, _ = batch(256)
    options: dict[str, Any] = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        ours, theirs = model(input_ids=ids, **options), whole(input_ids=ids, **options)
    pairs = [
        *zip(ours.attentions, theirs.attentions, strict=True),
        *zip(ours.hidden_states, theirs.hidden_states, strict=True),
    ]
    return {
        "differences": [float((a - b).abs().max()) for a, b in pairs],
        "kinds": {type(a).__name__ for a, _ in pairs},
    }


@pytest.mark.parametrize("layers", [2, 5])  # of a deep one, the first blocks alone are captured to plan it
def test_attentions_and_hidden_states_are_whole(ranks: Any, layers: int) -> None:
    for found in ranks(2).run(cached, "llama", layers):
        assert len(found["differences"]) == 2 * layers + 1
        assert max(found["differences"]) < 1e-4 and found["kinds"] == {"Tensor"}
