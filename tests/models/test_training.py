"""Training a parallel model against the unsharded one: optimizers, clipping, mixed precision, frozen parameters."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import (
    batch,
    gradient_errors,
    max_difference,
    parallel,
    parallel_module,
    parameter_errors,
    reference,
    same_tokens,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

STEPS = 3


@pytest.fixture
def folder(checkpoints: Any) -> str:
    """One layer, a KV head that is replicated on both ranks, and a vocabulary that is not divisible by two."""
    return checkpoints("llama", num_hidden_layers=1, num_key_value_heads=1, vocab_size=251)


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    """An optimizer of this kind for the parameters that are trained."""
    from transformers.optimization import Adafactor

    parameters = [p for p in model.parameters() if p.requires_grad]
    makers: dict[str, Any] = {
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
    return makers[kind]()


def train(
    model: Any, optimizer: torch.optim.Optimizer, scheduler: Any = None, clip: float | None = None
) -> list[float]:
    """Losses of some steps with two micro-batches each."""
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


def run_optimizers(folder: str, kinds: list[str]) -> dict[str, Any]:
    """For every kind: errors of losses and parameters after some steps with a decaying rate, and if the loss falls."""
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


@pytest.mark.parametrize("kinds", [FAST, pytest.param(MORE, marks=pytest.mark.long)])
def test_optimizer_follows_the_unsharded_model(folder: str, ranks: Any, kinds: list[str]) -> None:
    for found in ranks(2).run(run_optimizers, folder, kinds):
        assert list(found) == kinds
        for kind, (losses, parameters, falls) in found.items():
            assert losses < 1e-4 and parameters < 1e-3 and falls, f"{kind}: {losses}, {parameters}"


def clip_norms(folder: str) -> list[list[float]]:
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
                grad = each.get_parameter("model.layers.0.self_attn.k_proj.weight").grad  # replicated on both ranks
                grad = grad.full_tensor() if each is model else grad
                row += [float(total), float(grad.norm())]
            found.append(row)
    return found


@pytest.mark.long
def test_gradient_norm_counts_every_element_once(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(clip_norms, folder):
        for total, clipped, right_total, right_clipped in found:
            assert total == pytest.approx(right_total, rel=1e-5)
            assert clipped == pytest.approx(right_clipped, rel=1e-4)


def scale_gradients(folder: str) -> dict[str, Any]:
    """A step with a GradScaler, then one with an infinity in the second rank's shard only."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    errors, skipped, scales = [], [], []
    for overflow in (False, True):
        for each in (model, unsharded):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            each.zero_grad()
            scaler.scale(each(input_ids=ids, labels=labels).loss).backward()
            if overflow and each is model and dist.get_rank() == 1:
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
        if not overflow:
            errors = list(parameter_errors(model, unsharded).values())
    return {"errors": errors, "skipped": skipped, "scales": scales}


def test_overflow_on_one_rank_skips_the_step_on_all(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(scale_gradients, folder):
        assert max(found["errors"]) < 1e-4
        assert found["skipped"] == [False, True] and found["scales"] == [1024.0, 512.0]


def average_parameters(folder: str) -> dict[str, Any]:
    """Moving averages of the parameters, by torch's AveragedModel and by lerp_."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, _ = batch(251)
    logits, averages = [], []
    for each in (model, unsharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        average = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        lerped = copy.deepcopy(each)
        for _ in range(2):
            train(each, optimizer)
            average.update_parameters(each)
            with torch.no_grad():
                for mean, parameter in zip(lerped.parameters(), each.parameters(), strict=True):
                    mean.lerp_(parameter, 0.3)
        with torch.no_grad():
            logits.append([m(input_ids=ids).logits for m in (each, average, lerped)])
        averages.append(lerped)
    return {
        "differences": [max_difference(a, b) for a, b in zip(*logits, strict=True)],
        "change": max_difference(logits[0][0], logits[0][1]),
        "averages": max(parameter_errors(*averages).values()),
    }


@pytest.mark.long
def test_averaged_model_equals_the_unsharded_average(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(average_parameters, folder):
        assert max(found["differences"]) < 1e-4 and found["averages"] < 1e-4
        assert found["change"] > 1e-2, "the averaged model has the parameters of the model"


def train_in_bfloat16(folder: str, way: str) -> dict[str, Any]:
    """Errors of loss and gradients against float64, of both models, with autocast or with parameters in bfloat16."""
    ids, labels = batch(251)
    exact = reference(folder).double()
    exact(input_ids=ids, labels=labels).loss.backward()
    right = {name: p.grad for name, p in exact.named_parameters()}
    dtype = torch.bfloat16 if way == "parameters" else None
    model = parallel(folder, torch_dtype=dtype)[0]
    unsharded = reference(folder) if dtype is None else reference(folder, dtype=dtype)
    found: dict[str, Any] = {"dtypes": []}
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
        found["dtypes"].append((output.logits.dtype, output.loss.dtype))
    return found


@pytest.mark.parametrize("way", ["autocast", pytest.param("parameters", marks=pytest.mark.long)])
def test_bfloat16_is_as_accurate_as_unsharded(folder: str, ranks: Any, way: str) -> None:
    for found in ranks(2).run(train_in_bfloat16, folder, way):
        (loss, gradient), (their_loss, their_gradient) = found["ours"], found["theirs"]
        assert gradient < 1.5 * their_gradient + 1e-3 and loss < 2 * their_loss + 5e-3, found
        assert found["dtypes"][0] == found["dtypes"][1] and found["dtypes"][0][0] == torch.bfloat16


def train_with_frozen_parameters(folder: str) -> dict[str, Any]:
    """Gradient and parameter errors with the MLPs frozen, then with the attention frozen instead."""
    model, unsharded = parallel(folder)[0], reference(folder)
    found = []
    for frozen in ("mlp", "self_attn"):
        for each in (model, unsharded):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(frozen not in name)
                parameter.grad = None
            train(each, optimizer_of("adamw", each), clip=0.5)
        ids, labels = batch(251)
        for each in (model, unsharded):
            each(input_ids=ids, labels=labels).loss.backward()
        found.append(
            (max(gradient_errors(model, unsharded).values()), max(parameter_errors(model, unsharded).values()))
        )
        assert all((p.grad is None) == (frozen in name) for name, p in model.named_parameters())
    return {"errors": found}


@pytest.mark.long
def test_frozen_parameters_have_no_gradient(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(train_with_frozen_parameters, folder):
        for gradients, parameters in found["errors"]:
            assert gradients < 1e-3 and parameters < 1e-3


class Checkpointed(nn.Module):
    """Blocks under ``torch.utils.checkpoint``, with a dropout inside."""

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


def checkpoint_blocks() -> list[float]:
    """Gradient errors with both kinds of activation checkpointing."""
    found = []
    for reentrant in (False, True):
        x = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
        model, unsharded, _ = parallel_module(partial(Checkpointed, reentrant), x)
        for each in (model, unsharded):
            each(x.clone().requires_grad_()).square().sum().backward()
        found.append(max(gradient_errors(model, unsharded).values()))
    return found


@pytest.mark.long
def test_torch_checkpoint_in_a_custom_module_keeps_gradients(ranks: Any) -> None:
    for found in ranks(2).run(checkpoint_blocks):
        assert max(found) < 1e-4


class Classifier(nn.Module):
    """A loss with class weights inside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 251)
        self.register_buffer("importance", torch.rand(251))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(nn.functional.gelu(self.up(x)))
        return nn.functional.cross_entropy(
            logits, target, self.importance, ignore_index=3, label_smoothing=0.1, reduction="sum"
        )


def weight_classes() -> dict[str, Any]:
    """Losses and gradient errors of the classifier, and its plan."""
    torch.manual_seed(1)
    x, target = torch.randn(8, 32), torch.randint(0, 251, (8,))
    target[0] = 3
    model, unsharded, ctx = parallel_module(Classifier, (x, target))
    losses = [each(x, target) for each in (model, unsharded)]
    for loss in losses:
        loss.backward()
    return {
        "losses": [float(loss.detach()) for loss in losses],
        "gradients": max(gradient_errors(model, unsharded).values()),
        "layers": [(layer.kind, layer.axis) for layer in ctx.plan.layers],
        "collectives": [each.shape for each in ctx.plan.collectives],
    }


def test_loss_with_class_weights_keeps_logits_sharded(ranks: Any) -> None:
    for found in ranks(2).run(weight_classes):
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5) and found["gradients"] < 1e-4
        assert ("cross_entropy", "vocab") in found["layers"]
        assert all(251 not in shape for shape in found["collectives"]), "the logits are gathered"


def read_logits(folder: str) -> dict[str, Any]:
    """Types and errors of logits that are returned with a loss, and the gradients through both."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    output, right = model(input_ids=ids, labels=labels), unsharded(input_ids=ids, labels=labels)
    types = [type(dict.__getitem__(output, "logits")).__name__]
    difference = max_difference(output.logits, right.logits)
    types += [type(output.logits).__name__, type(output["logits"]).__name__, type(output[1]).__name__]
    assert type(output) is type(right)
    for result in (output, right):
        (result.loss + result.logits.softmax(-1).square().sum()).backward()
    other = model(input_ids=ids, labels=labels, return_dict=False)
    return {
        "types": types,
        "difference": difference,
        "gradients": max(gradient_errors(model, unsharded).values()),
        "tuple": max_difference(other[1], right.logits),
    }


@pytest.mark.long
def test_logits_returned_with_a_loss_are_gathered_when_read(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(read_logits, folder):
        assert found["types"] == ["ShardedTensor", "Tensor", "Tensor", "Tensor"]
        assert found["difference"] < 1e-4 and found["gradients"] < 1e-3 and found["tuple"] < 1e-4


def copy_and_zero(folder: str) -> dict[str, Any]:
    """Errors of a deep copy, after the parameters of the original were set to zero."""
    model, unsharded = parallel(folder)[0], reference(folder)
    ids, labels = batch(251)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        right = unsharded(input_ids=ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        found = [twin(input_ids=ids).logits, twin.forward(input_ids=ids).logits]
        zeroed = float(model(input_ids=ids).logits.abs().max())
    twin(input_ids=ids, labels=labels).loss.backward()
    unsharded(input_ids=ids, labels=labels).loss.backward()
    return {
        "differences": [max_difference(logits, right) for logits in found],
        "zeroed": zeroed,
        "gradients": max(gradient_errors(twin, unsharded).values()),
        "tokens": same_tokens(twin, unsharded, ids, 3),
    }


@pytest.mark.long
def test_deep_copy_does_not_share_parameters(folder: str, ranks: Any) -> None:
    for found in ranks(2).run(copy_and_zero, folder):
        assert max(found["differences"]) < 1e-4 and found["zeroed"] == 0.0
        assert found["gradients"] < 1e-3 and found["tokens"]
