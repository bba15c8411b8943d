"""Models on meshes of data-parallel and tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from models.compare import batch, parallel, reference
from models.meshes import batches, beside_unsharded, mean_over, mine, on_mesh, steps
from models.tiny import CONFIGS, LLAMA, save
from torch import nn

from paraxis import CaptureError, load_state, no_sync, save_state

MOE = ("mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False})
CONFIGS.setdefault("mixtral", MOE)


@pytest.mark.parametrize(
    ("name", "data_parallel", "count"),
    [
        ("llama", "shard", 6),
        pytest.param("llama", "shard", 20, marks=long),
        pytest.param("llama", "replicate", 20, marks=long),
        pytest.param("gpt2", "shard", 20, marks=long),
        pytest.param("gpt2", "replicate", 20, marks=long),
        pytest.param("mixtral", "shard", 20, marks=long),
        pytest.param("mixtral", "replicate", 20, marks=long),
        pytest.param("llama-tied", "shard", 20, marks=long),
    ],
)
def test_training_follows_the_unsharded_model(
    ranks: Any, tmp_path: Path, name: str, data_parallel: str, count: int
) -> None:
    """Steps of AdamW with clipping, and what a rank holds of parameters, gradients and optimizer's state."""
    folder = save(name, tmp_path)
    for found in ranks(4).run(beside_unsharded, folder, 2, 2, data_parallel, count + 1, timeout=280):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found
        assert found["placed"] and found["last"] < found["first"]
        assert found["fraction"] < (0.27 if data_parallel == "shard" else 0.53), found


@long
@pytest.mark.parametrize("options", [{"compile": "inductor"}, {"enable_sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_with_other_options(ranks: Any, tmp_path: Path, data_parallel: str, options: dict[str, Any]) -> None:
    folder = save("llama", tmp_path)
    for found in ranks(4).run(beside_unsharded, folder, 2, 2, data_parallel, count=6, timeout=280, **options):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found


@long
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (1, 4), (3, 1)])
def test_other_meshes(ranks: Any, tmp_path: Path, dp: int, tp: int) -> None:
    """Three ranks do not divide any size."""
    folder = save("llama", tmp_path)
    for found in ranks(dp * tp).run(beside_unsharded, folder, dp, tp, "shard", count=6, rows=12):
        assert found["losses"] < 1e-4 and found["parameters"] < 1e-3, found
        assert found["fraction"] < 1.1 / (dp * tp), found


# -- gradient accumulation, checkpointing, dropout, evaluation -----------------------------------------------------


def accumulates(folder: str, data_parallel: str) -> dict[str, float]:
    """Four parts of a batch on every rank, with activation checkpointing; gradients beside the unsharded model."""
    from models.compare import gradient_errors

    model, ctx = on_mesh(folder, 2, 2, data_parallel=data_parallel)
    unsharded = reference(folder)
    ids = batches(1, rows=8)[0]
    model.train()
    model.gradient_checkpointing_enable()
    parts = mine(ids, ctx).split(1)
    for i, part in enumerate(parts):
        loss = model(input_ids=part, labels=part, use_cache=False).loss / len(parts)
        if i < len(parts) - 1:
            with no_sync(model):
                loss.backward()
        else:
            loss.backward()
    unsharded(input_ids=ids, labels=ids).loss.backward()
    return gradient_errors(model, unsharded)


@long
@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_gradients_that_are_added_up(ranks: Any, tmp_path: Path, data_parallel: str) -> None:
    for errors in ranks(4).run(accumulates, save("llama", tmp_path), data_parallel):
        assert max(errors.values()) < 1e-3


def draws(folder: str) -> tuple[float, float, torch.Tensor]:
    """The same batch on all ranks, seeded alike: only dropout can make a difference."""
    model, _ = on_mesh(folder, 2, 2, data_parallel="shard", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    ids, labels = batch(256)
    with torch.no_grad():
        still = float(model(input_ids=ids, labels=labels).loss)
    model.train()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return still, float(loss), model.transformer.ln_f.weight.grad.to_local()


@long
def test_dropout_differs_between_data_parallel_ranks_alone(ranks: Any, tmp_path: Path) -> None:
    found = ranks(4).run(draws, save("gpt2", tmp_path))
    assert len({still for still, _, _ in found}) == 1
    first, second, third, fourth = (loss for _, loss, _ in found)
    assert first == second and third == fourth and abs(first - third) > 1e-4
    assert all(torch.equal(gradient, found[0][2]) for _, _, gradient in found)


# -- generation and saving ---------------------------------------------------------------------------------------


def generates(folder: str, target: str, data_parallel: str) -> tuple[bool, bool]:
    """Every data-parallel rank has a prompt of its own, of another length, and another number of tokens to make."""
    model, ctx = on_mesh(folder, 2, 2, data_parallel=data_parallel)
    unsharded = reference(folder)
    ids, _ = batch(256, length=6 + ctx.dp_rank)
    options = {"max_new_tokens": 4 + 3 * ctx.dp_rank, "do_sample": False}
    same = torch.equal(model.generate(ids, **options), unsharded.generate(ids, **options))
    model.save_pretrained(target)
    state = model.state_dict()
    right = unsharded.state_dict()
    return same, all(torch.equal(value.full_tensor(), right[name]) for name, value in state.items())


@pytest.mark.parametrize("data_parallel", ["shard", "replicate"])
@long
def test_generation_and_an_ordinary_checkpoint(ranks: Any, tmp_path: Path, data_parallel: str) -> None:
    from safetensors.torch import load_file

    folder, target = save("llama", tmp_path / "model"), tmp_path / "saved"
    assert ranks(4).run(generates, folder, str(target), data_parallel) == [(True, True)] * 4
    before, after = load_file(f"{folder}/model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in target.iterdir()) == sorted(
        ["config.json", "generation_config.json", "model.safetensors"]
    )


# -- going on from a checkpoint ------------------------------------------------------------------------------------


def begins(folder: str, target: str, data_parallel: str) -> list[float]:
    """Two steps, saved, and two more."""
    model, ctx = on_mesh(folder, 2, 2, data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [mine(ids, ctx) for ids in batches(4)]
    steps(model, data[:2], optimizer=optimizer)
    save_state(target, model, optimizer, step=2)
    return mean_over(steps(model, data[2:], optimizer=optimizer), ctx.groups.dp)


def goes_on(folder: str, target: str, dp: int, tp: int, data_parallel: str) -> list[float]:
    model, ctx = on_mesh(folder, dp, tp, data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    assert load_state(target, model, optimizer) == {"step": 2}
    data = [mine(ids, ctx) for ids in batches(4)]
    return mean_over(steps(model, data[2:], optimizer=optimizer), ctx.groups.dp)


def goes_on_without_mesh(folder: str, target: str) -> list[float]:
    model, _ = parallel(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    load_state(target, model, optimizer)
    return steps(model, batches(4)[2:], optimizer=optimizer)


@long
@pytest.mark.parametrize("data_parallel", ["shard", "replicate"])
def test_other_meshes_go_on(ranks: Any, tmp_path: Path, data_parallel: str) -> None:
    """Packed projections, biases and a tied table too."""
    folder, target = save("gpt2", tmp_path / "model"), str(tmp_path / "state")
    saved = ranks(4).run(begins, folder, target, data_parallel)[0]
    for dp, tp in ((1, 4), (4, 1)):
        for losses in ranks(4).run(goes_on, folder, target, dp, tp, data_parallel):
            assert losses == pytest.approx(saved, abs=1e-5)
    for losses in ranks(2).run(goes_on_without_mesh, folder, target):
        assert losses == pytest.approx(saved, abs=1e-5)


def adapted(folder: str) -> list[float]:
    """A plain module in the place of a projection: the projection and something small beside it."""
    model, ctx = on_mesh(folder, 2, 2, data_parallel="shard")
    unsharded = reference(folder)
    ids = batches(1)[0]
    for each in (model, unsharded):
        torch.manual_seed(0)
        for parameter in each.parameters():
            parameter.requires_grad_(False)
        layer = each.model.layers[0].self_attn
        layer.q_proj = Beside(layer.q_proj)
    for each, rows in ((model, mine(ids, ctx)), (unsharded, ids)):
        each(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    pairs = zip(model.parameters(), unsharded.parameters(), strict=True)
    return [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs if q.requires_grad]


class Beside(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@long
def test_adapters_are_averaged_too(ranks: Any, tmp_path: Path) -> None:
    for errors in ranks(4).run(adapted, save("llama", tmp_path)):
        assert len(errors) == 2 and max(errors) < 1e-3


# -- a module of one's own -----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Not one graph: which expert a batch goes to depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.sum() > 0)](x)  # type: ignore[no-any-return]


def chooses(data_parallel: str) -> list[float]:
    """Every data-parallel rank uses an expert that the other does not use."""
    from models.meshes import mesh_context

    from paraxis import parallelize_model

    torch.manual_seed(0)
    plain = Experts()
    torch.manual_seed(0)
    ctx = mesh_context(2, 2)
    model = parallelize_model(
        Experts(), ctx, example_inputs=torch.ones(4, 8), data_parallel=data_parallel, show_progress=False
    )
    inputs = [torch.ones(4, 8), -torch.ones(4, 8)]
    model(inputs[ctx.dp_rank]).square().mean().backward()
    sum(plain(x).square().mean() / 2 for x in inputs).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs]


def test_experts_that_only_one_rank_uses(ranks: Any) -> None:
    for errors in ranks(4).run(chooses, "replicate"):
        assert len(errors) == 4 and max(errors) < 1e-6


def refuses() -> str:
    with pytest.raises(CaptureError) as error:
        chooses("shard")
    return str(error.value)


def test_what_is_not_one_graph_is_not_split(ranks: Any) -> None:
    for message in ranks(4).run(refuses):
        assert "is not one graph" in message and "data_parallel='replicate'" in message
