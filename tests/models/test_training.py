"""Training a parallel model with what people train with, beside the unsharded model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from models.compare import batch, context, gradient_errors, parallel, reference
from models.tiny import save
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from paraxis import parallelize_model

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One layer; a KV head that lives on both ranks, and a vocabulary that does not divide."""
    return save("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1, num_key_value_heads=1, vocab_size=251)


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    parameters = [p for p in model.parameters() if p.requires_grad]
    made: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
        "adamw-foreach": lambda: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
        "adamw-fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        "amsgrad": lambda: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        "sgd-fused": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-2),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-3),
        "adafactor": lambda: torch.optim.Adafactor(parameters, lr=1e-2),
        "adafactor-foreach": lambda: torch.optim.Adafactor(parameters, lr=1e-2, foreach=True),
        "adafactor-transformers": lambda: Adafactor(parameters, scale_parameter=True, relative_step=True),
        "muon": lambda: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2),
    }
    return made[kind]()


def parameter_errors(model: Any, unsharded: Any) -> dict[str, float]:
    pairs = zip(model.named_parameters(), unsharded.parameters(), strict=True)
    return {name: float((found.full_tensor() - right).detach().norm() / right.norm()) for (name, found), right in pairs}


def train(
    model: Any, optimizer: torch.optim.Optimizer, scheduler: Any = None, clip: float | None = None
) -> list[float]:
    """Losses of some steps, each of two batches."""
    ids, labels = batch(251)
    losses = []
    for _ in range(STEPS):
        for row in range(2):
            loss = model(input_ids=ids[row : row + 1], labels=labels[row : row + 1]).loss / 2
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def optimizers(folder: str, kinds: list[str]) -> dict[str, Any]:
    """For every kind: by how much the losses differ, and the parameters after some steps with a falling rate."""
    model, unsharded = parallel(folder)[0], reference(folder)
    before = [p.detach().clone() for p in unsharded.parameters()]
    found = {}
    for kind in kinds:
        losses = []
        for each in (model, unsharded):
            with torch.no_grad():
                for parameter, value in zip(each.parameters(), before, strict=True):
                    parameter.copy_(value)
            optimizer = optimizer_of(kind, each)
            relative = kind == "adafactor-transformers"
            scheduler = None if relative else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(train(each, optimizer, scheduler))
        difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
        found[kind] = (difference, max(parameter_errors(model, unsharded).values()), losses[0][-1] < losses[0][0])
    return found


FAST = ["adamw-fused", "sgd", "adafactor", "adafactor-transformers"]  # AdamW otherwise: test_behaviour.py
MORE = ["adamw", "adamw-foreach", "amsgrad", "sgd-fused", "adagrad", "rmsprop", "muon", "adafactor-foreach"]


@pytest.mark.parametrize("kinds", [FAST, pytest.param(MORE, marks=long)])
def test_optimizers_follow_the_unsharded_run(folder: str, ranks: Any, kinds: list[str]) -> None:
    for found in ranks(2).run(optimizers, folder, kinds):
        assert list(found) == kinds
        for kind, (losses, parameters, falls) in found.items():
            assert losses < 1e-4 and parameters < 1e-3 and falls, f"{kind}: {losses}, {parameters}"


def clipped(folder: str) -> list[list[float]]:
    """For every kind of norm: the total norm and that of a clipped gradient, parallel and unsharded."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    found = []
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (True, False):
            row = []
            for each in (model, unsharded):
                each.zero_grad()
                each(input_ids=ids, labels=labels).loss.backward()
                total = nn.utils.clip_grad_norm_(each.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
                grad = each.get_parameter("model.layers.0.self_attn.k_proj.weight").grad  # copies on both ranks
                grad = grad.full_tensor() if each is model else grad
                row += [float(total), float(grad.norm())]
            found.append(row)
    return found


@long
def test_every_element_counts_once_in_a_norm(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(clipped, folder):
        for total, part, right_total, right_part in found:
            assert total == pytest.approx(right_total, rel=1e-5) and part == pytest.approx(right_part, rel=1e-4)


def scaled(folder: str) -> dict[str, Any]:
    """A step of a scaler, then one with infinity in what the second rank alone holds."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    errors, skipped, scales = [], [], []
    for poisoned in (False, True):
        for each in (model, unsharded):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            each.zero_grad()
            scaler.scale(each(input_ids=ids, labels=labels).loss).backward()
            if poisoned and each is model and dist.get_rank() == 1:
                each.get_parameter("lm_head.weight").grad.to_local()[-1, 0] = float("inf")
            before = each.get_parameter("model.norm.weight").detach().clone()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if each is model:
                after = each.get_parameter("model.norm.weight").detach()
                skipped.append(torch.equal(before.to_local(), after.to_local()))
                scales.append(scaler.get_scale())
        if not poisoned:
            errors = list(parameter_errors(model, unsharded).values())
    return {"errors": errors, "skipped": skipped, "scales": scales}


def test_infinity_on_one_rank_skips_the_step_on_all(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(scaled, folder):
        assert max(found["errors"]) < 1e-4
        assert found["skipped"] == [False, True] and found["scales"] == [1024.0, 512.0]


def averaged(folder: str) -> dict[str, Any]:
    """Averages of the parameters by torch's tool and by hand, and the averaged model itself."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, _ = batch(251)
    logits, by_hand = [], []
    for each in (model, unsharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        average = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        hand = copy.deepcopy(each)
        for _ in range(2):
            train(each, optimizer)
            average.update_parameters(each)
            with torch.no_grad():
                for mean, parameter in zip(hand.parameters(), each.parameters(), strict=True):
                    mean.lerp_(parameter, 0.3)
        with torch.no_grad():
            logits.append([m(input_ids=ids).logits for m in (each, average, hand)])
        by_hand.append(hand)
    return {
        "differences": [float((a - b).abs().max()) for a, b in zip(*logits, strict=True)],
        "apart": float((logits[0][0] - logits[0][1]).abs().max()),
        "by_hand": max(parameter_errors(*by_hand).values()),
    }


@long
def test_averages_of_the_parameters(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(averaged, folder):
        assert max(found["differences"]) < 1e-4 and found["by_hand"] < 1e-4
        assert found["apart"] > 1e-2, "the averaged model is the model itself"


def narrow(folder: str, way: str) -> dict[str, Any]:
    """Autocast, or parameters in bfloat16: how far loss and gradients are from float64, both models."""
    ids, labels = batch(251)
    exact = reference(folder).double()
    exact(input_ids=ids, labels=labels).loss.backward()
    right = {name: p.grad for name, p in exact.named_parameters()}
    dtype = torch.bfloat16 if way == "parameters" else None
    model = parallel(folder, torch_dtype=dtype)[0]
    unsharded = reference(folder) if dtype is None else reference(folder, dtype=dtype)
    found: dict[str, Any] = {"kinds": []}
    for key, each in (("ours", model), ("theirs", unsharded)):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            output = each(input_ids=ids, labels=labels)
        output.loss.backward()
        errors = []
        for name, parameter in each.named_parameters():
            assert parameter.grad.dtype == parameter.dtype
            grad = parameter.grad.full_tensor() if each is model else parameter.grad
            errors.append(float((grad.double() - right[name]).norm() / right[name].norm()))
        found[key] = (abs(float(output.loss.double() - exact(input_ids=ids, labels=labels).loss)), max(errors))
        found["kinds"].append((output.logits.dtype, output.loss.dtype))
    return found


@pytest.mark.parametrize("way", ["autocast", pytest.param("parameters", marks=long)])
def test_bfloat16_is_as_close_as_unsharded(folder: str, ranks: Any, way: str) -> None:
    for found in ranks(2).run(narrow, folder, way):
        (loss, gradient), (their_loss, their_gradient) = found["ours"], found["theirs"]
        assert gradient < 1.5 * their_gradient + 1e-3 and loss < 2 * their_loss + 5e-3, found
        assert found["kinds"][0] == found["kinds"][1] and found["kinds"][0][0] == torch.bfloat16


def frozen(folder: str) -> dict[str, Any]:
    """Parts of the model are not trained; then others are not."""
    model, unsharded = parallel(folder)[0], reference(folder)
    found = []
    for part in ("mlp", "self_attn"):
        for each in (model, unsharded):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(part not in name)
                parameter.grad = None
            train(each, optimizer_of("adamw", each), clip=0.5)
        ids, labels = batch(251)
        for each in (model, unsharded):
            each(input_ids=ids, labels=labels).loss.backward()
        found.append(
            (max(gradient_errors(model, unsharded).values()), max(parameter_errors(model, unsharded).values()))
        )
        assert all((p.grad is None) == (part in name) for name, p in model.named_parameters())
    return {"errors": found}


@long
def test_frozen_parameters(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(frozen, folder):
        for gradients, parameters in found["errors"]:
            assert gradients < 1e-3 and parameters < 1e-3


class Checkpointed(nn.Module):
    """A module of one's own that recomputes its blocks, with dropout inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, 32)) for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def recomputed() -> list[float]:
    found = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        whole = Checkpointed(reentrant)
        model = copy.deepcopy(whole)
        x = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
        parallelize_model(model, context(), example_inputs=x, show_progress=False)
        for each in (model, whole):
            given = x.clone().requires_grad_()
            each(given).square().sum().backward()
        found.append(max(gradient_errors(model, whole).values()))
    return found


@long
def test_torch_checkpointing_in_a_module_of_ones_own(ranks: Any) -> None:
    for found in ranks(2).run(recomputed):
        assert max(found) < 1e-4


class Classifier(nn.Module):
    """A loss with class weights, inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 251)
        self.register_buffer("importance", torch.rand(251))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(nn.functional.gelu(self.up(x)))
        return nn.functional.cross_entropy(
            logits, target, self.importance, ignore_index=3, label_smoothing=0.1, reduction="sum"
        )


def weighted() -> dict[str, Any]:
    torch.manual_seed(0)
    whole = Classifier()
    model, ctx = copy.deepcopy(whole), context()
    x, target = torch.randn(8, 32), torch.randint(0, 251, (8,))
    target[0] = 3
    parallelize_model(model, ctx, example_inputs=(x, target), show_progress=False)
    losses = [each(x, target) for each in (model, whole)]
    for loss in losses:
        loss.backward()
    return {
        "losses": [float(loss.detach()) for loss in losses],
        "gradients": max(gradient_errors(model, whole).values()),
        "layers": [(layer.kind, layer.axis) for layer in ctx.plan.layers],
        "collectives": [each.shape for each in ctx.plan.collectives],
    }


def test_class_weights_inside_a_module(ranks: Any) -> None:
    for found in ranks(2).run(weighted):
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5) and found["gradients"] < 1e-4
        assert ("cross_entropy", "vocab") in found["layers"]
        assert all(251 not in shape for shape in found["collectives"]), "the logits are gathered"


def read_later(folder: str) -> dict[str, Any]:
    """Logits beside a loss: sharded until they are read, then whole, with the gradient of what is made of them."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    output, right = model(input_ids=ids, labels=labels), unsharded(input_ids=ids, labels=labels)
    kinds = [type(dict.__getitem__(output, "logits")).__name__]
    difference = float((output.logits - right.logits).abs().max())
    kinds += [type(output.logits).__name__, type(output["logits"]).__name__, type(output[1]).__name__]
    assert type(output) is type(right)
    for result in (output, right):
        (result.loss + result.logits.softmax(-1).square().sum()).backward()
    other = model(input_ids=ids, labels=labels, return_dict=False)
    return {
        "kinds": kinds,
        "difference": difference,
        "gradients": max(gradient_errors(model, unsharded).values()),
        "tuple": float((other[1] - right.logits).abs().max()),
    }


@long
def test_logits_beside_a_loss_are_whole_when_read(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(read_later, folder):
        assert found["kinds"] == ["ShardedTensor", "Tensor", "Tensor", "Tensor"]
        assert found["difference"] < 1e-4 and found["gradients"] < 1e-3 and found["tuple"] < 1e-4


def copied(folder: str) -> dict[str, Any]:
    """A copy is a model of its own: what happens to the one does not happen to the other."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        right = unsharded(input_ids=ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        found = [twin(input_ids=ids).logits, twin.forward(input_ids=ids).logits]
        nothing = float(model(input_ids=ids).logits.abs().max())
    twin(input_ids=ids, labels=labels).loss.backward()
    unsharded(input_ids=ids, labels=labels).loss.backward()
    tokens = [m.generate(ids, max_new_tokens=3, do_sample=False) for m in (twin, unsharded)]
    return {
        "differences": [float((logits - right).abs().max()) for logits in found],
        "nothing": nothing,
        "gradients": max(gradient_errors(twin, unsharded).values()),
        "tokens": torch.equal(*tokens),
    }


@long
def test_a_copy_is_a_model_of_its_own(folder: str, ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(copied, folder):
        assert max(found["differences"]) < 1e-4 and found["nothing"] == 0.0
        assert found["gradients"] < 1e-3 and found["tokens"]
