"""Models on meshes of data-parallel and tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import batch, gradient_errors, parallel, reference
from models.meshes import (
    batches,
    mean_over_ranks,
    mesh_context,
    parallel_on_mesh,
    rows_of_rank,
    train_against_unsharded,
    train_steps,
)
from torch import nn

from paraxis import CaptureError, load_state, no_sync, parallelize_model, save_state


@pytest.mark.parametrize(
    ("name", "data_parallel", "count"),
    [
        ("llama", "shard", 6),
        pytest.param("llama", "shard", 20, marks=pytest.mark.long),
        pytest.param("llama", "replicate", 20, marks=pytest.mark.long),
        pytest.param("gpt2", "shard", 20, marks=pytest.mark.long),
        pytest.param("gpt2", "replicate", 20, marks=pytest.mark.long),
        pytest.param("mixtral", "shard", 20, marks=pytest.mark.long),
        pytest.param("mixtral", "replicate", 20, marks=pytest.mark.long),
        pytest.param("llama-tied", "shard", 20, marks=pytest.mark.long),
    ],
)
def test_training_follows_the_unsharded_model(
    ranks: Any, checkpoints: Any, name: str, data_parallel: str, count: int
) -> None:
    """Steps of AdamW with clipping, and the fraction of parameters, gradients and optimizer states on a rank."""
    folder = checkpoints(name)
    for found in ranks(4).run(train_against_unsharded, folder, 2, 2, data_parallel, count + 1, timeout=280):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found
        assert found["placed"] and found["last"] < found["first"]
        assert found["fraction"] < (0.27 if data_parallel == "shard" else 0.53), found


@pytest.mark.long
@pytest.mark.parametrize("options", [{"compile": "inductor"}, {"enable_sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_other_options_follow_the_unsharded_model(
    ranks: Any, checkpoints: Any, data_parallel: str, options: dict[str, Any]
) -> None:
    folder = checkpoints("llama")
    for found in ranks(4).run(train_against_unsharded, folder, 2, 2, data_parallel, count=6, timeout=280, **options):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found


@pytest.mark.long
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (1, 4), (3, 1)])
def test_other_meshes_follow_the_unsharded_model(ranks: Any, checkpoints: Any, dp: int, tp: int) -> None:
    """No size is divisible by three ranks."""
    folder = checkpoints("llama")
    for found in ranks(dp * tp).run(train_against_unsharded, folder, dp, tp, "shard", count=6, rows=12):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found
        assert found["fraction"] < 1.1 / (dp * tp), found


# -- gradient accumulation, checkpointing, dropout, evaluation -----------------------------------------------------


def accumulate_gradients(folder: str, data_parallel: str) -> dict[str, float]:
    """Gradient errors of four micro-batches on every rank, with activation checkpointing."""
    model, ctx = parallel_on_mesh(folder, 2, 2, data_parallel=data_parallel)
    unsharded = reference(folder)
    ids = batches(1, rows=8)[0]
    model.train()
    model.gradient_checkpointing_enable()
    micro_batches = rows_of_rank(ids, ctx).split(1)
    for i, row in enumerate(micro_batches):
        loss = model(input_ids=row, labels=row, use_cache=False).loss / len(micro_batches)
        if i < len(micro_batches) - 1:
            with no_sync(model):
                loss.backward()
        else:
            loss.backward()
    unsharded(input_ids=ids, labels=ids).loss.backward()
    return gradient_errors(model, unsharded)


@pytest.mark.long
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_accumulated_gradients_equal_the_unsharded_models(ranks: Any, checkpoints: Any, data_parallel: str) -> None:
    for errors in ranks(4).run(accumulate_gradients, checkpoints("llama"), data_parallel):
        assert max(errors.values()) < 1e-3


def train_with_dropout(folder: str) -> tuple[float, float, torch.Tensor]:
    """Losses without and with dropout, of the same batch and seed on all ranks, and a reduced gradient."""
    model, _ = parallel_on_mesh(folder, 2, 2, data_parallel="shard", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    ids, labels = batch(256)
    with torch.no_grad():
        evaluated = float(model(input_ids=ids, labels=labels).loss)
    model.train()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return evaluated, float(loss), model.transformer.ln_f.weight.grad.to_local()


@pytest.mark.long
def test_dropout_differs_only_between_data_parallel_ranks(ranks: Any, checkpoints: Any) -> None:
    found = ranks(4).run(train_with_dropout, checkpoints("gpt2"))
    assert len({evaluated for evaluated, _, _ in found}) == 1
    first, second, third, fourth = (loss for _, loss, _ in found)
    assert first == second and third == fourth and abs(first - third) > 1e-4
    assert all(torch.equal(gradient, found[0][2]) for _, _, gradient in found)


# -- generation and saving ---------------------------------------------------------------------------------------


def generate_and_save(folder: str, target: str, data_parallel: str) -> tuple[bool, bool]:
    """Whether tokens and weights are right, with another prompt and number of tokens on every data-parallel rank."""
    model, ctx = parallel_on_mesh(folder, 2, 2, data_parallel=data_parallel)
    unsharded = reference(folder)
    ids, _ = batch(256, length=6 + ctx.dp_rank)
    options = {"max_new_tokens": 4 + 3 * ctx.dp_rank, "do_sample": False}
    same = torch.equal(model.generate(ids, **options), unsharded.generate(ids, **options))
    model.save_pretrained(target)
    state = model.state_dict()
    right = unsharded.state_dict()
    return same, all(torch.equal(value.full_tensor(), right[name]) for name, value in state.items())


@pytest.mark.long
@pytest.mark.parametrize("data_parallel", ["shard", "replicate"])
def test_generates_and_saves_an_ordinary_checkpoint(
    ranks: Any, checkpoints: Any, tmp_path: Path, data_parallel: str
) -> None:
    from safetensors.torch import load_file

    folder, target = checkpoints("llama"), tmp_path / "saved"
    assert ranks(4).run(generate_and_save, folder, str(target), data_parallel) == [(True, True)] * 4
    before, after = load_file(f"{folder}/model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in target.iterdir()) == sorted(
        ["config.json", "generation_config.json", "model.safetensors"]
    )


# -- resuming from a checkpoint ------------------------------------------------------------------------------------


def train_and_save(folder: str, target: str, data_parallel: str) -> list[float]:
    """Two steps, a checkpoint, and two more steps; the losses of these."""
    model, ctx = parallel_on_mesh(folder, 2, 2, data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [rows_of_rank(ids, ctx) for ids in batches(4)]
    train_steps(model, data[:2], optimizer=optimizer)
    save_state(target, model, optimizer, step=2)
    return mean_over_ranks(train_steps(model, data[2:], optimizer=optimizer), ctx.groups.dp)


def resume(folder: str, target: str, dp: int, tp: int, data_parallel: str) -> list[float]:
    """The losses of two steps from the checkpoint."""
    model, ctx = parallel_on_mesh(folder, dp, tp, data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    assert load_state(target, model, optimizer) == {"step": 2}
    data = [rows_of_rank(ids, ctx) for ids in batches(4)]
    return mean_over_ranks(train_steps(model, data[2:], optimizer=optimizer), ctx.groups.dp)


def resume_without_mesh(folder: str, target: str) -> list[float]:
    """The same with tensor parallelism only."""
    model, _ = parallel(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    load_state(target, model, optimizer)
    return train_steps(model, batches(4)[2:], optimizer=optimizer)


@pytest.mark.long
@pytest.mark.parametrize("data_parallel", ["shard", "replicate"])
def test_other_meshes_resume_with_the_same_losses(
    ranks: Any, checkpoints: Any, tmp_path: Path, data_parallel: str
) -> None:
    """Of a model with packed projections, biases and a tied embedding."""
    folder, target = checkpoints("gpt2"), str(tmp_path / "state")
    saved = ranks(4).run(train_and_save, folder, target, data_parallel)[0]
    for dp, tp in ((1, 4), (4, 1)):
        for losses in ranks(4).run(resume, folder, target, dp, tp, data_parallel):
            assert losses == pytest.approx(saved, abs=1e-5)
    for losses in ranks(2).run(resume_without_mesh, folder, target):
        assert losses == pytest.approx(saved, abs=1e-5)


def train_adapters(folder: str) -> list[float]:
    """Gradient errors of plain modules that are added to a frozen parallel model."""
    model, ctx = parallel_on_mesh(folder, 2, 2, data_parallel="shard")
    unsharded = reference(folder)
    ids = batches(1)[0]
    for each in (model, unsharded):
        torch.manual_seed(0)
        for parameter in each.parameters():
            parameter.requires_grad_(False)
        layer = each.model.layers[0].self_attn
        layer.q_proj = Adapter(layer.q_proj)
    for each, rows in ((model, rows_of_rank(ids, ctx)), (unsharded, ids)):
        each(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    pairs = zip(model.parameters(), unsharded.parameters(), strict=True)
    return [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs if q.requires_grad]


class Adapter(nn.Module):
    """A projection with a low-rank update."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@pytest.mark.long
def test_gradients_of_late_adapters_are_reduced(ranks: Any, checkpoints: Any) -> None:
    for errors in ranks(4).run(train_adapters, checkpoints("llama")):
        assert len(errors) == 2 and max(errors) < 1e-3


# -- graph breaks ---------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Has a graph break: the expert of a batch depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.sum() > 0)](x)  # type: ignore[no-any-return]


def use_one_expert_per_rank(data_parallel: str) -> list[float]:
    """Gradient errors, where every data-parallel rank uses another expert."""
    torch.manual_seed(0)
    unsharded = Experts()
    torch.manual_seed(0)
    ctx = mesh_context(2, 2)
    model = parallelize_model(
        Experts(), ctx, example_inputs=torch.ones(4, 8), data_parallel=data_parallel, show_progress=False
    )
    inputs = [torch.ones(4, 8), -torch.ones(4, 8)]
    model(inputs[ctx.dp_rank]).square().mean().backward()
    sum(unsharded(x).square().mean() / 2 for x in inputs).backward()
    pairs = zip(model.parameters(), unsharded.parameters(), strict=True)
    return [float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs]


def test_gradients_are_reduced_if_only_one_rank_has_them(ranks: Any) -> None:
    for errors in ranks(4).run(use_one_expert_per_rank, "replicate"):
        assert len(errors) == 4 and max(errors) < 1e-6


def shard_with_graph_break() -> str:
    """The error of a model with a graph break whose parameters are to be sharded over data-parallel ranks."""
    with pytest.raises(CaptureError) as error:
        use_one_expert_per_rank("shard")
    return str(error.value)


def test_graph_break_refuses_sharded_parameters(ranks: Any) -> None:
    for message in ranks(4).run(shard_with_graph_break):
        assert "is not one graph" in message and "data_parallel='replicate'" in message
