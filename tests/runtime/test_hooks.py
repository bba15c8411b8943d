"""Hooks that come and go on a parallel model do what they do on the unsharded one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models.compare import batch, max_difference, parallel, reference
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)

from paraxis.runtime.hooks import has_python_hooks, is_pure

FACTOR = 2.0


def with_state(module: nn.Module, args: Any, output: Any, factor: float = 2.0) -> Any:
    return output * FACTOR


def stores(module: nn.Module, args: Any, output: Any) -> None:
    module.last = output


def test_only_functions_of_their_arguments_are_part_of_a_graph() -> None:
    seen: list[Any] = []
    pure: list[Callable[..., Any]] = [
        lambda module, args, output: output * 2,
        lambda module, args, output: F.relu(output) + torch.tanh(args[0]).mean(-1, keepdim=True),
        lambda module, args, output: (output[0].clamp(min=0), *output[1:]) if isinstance(output, tuple) else output,
        lambda module, args, output: output.requires_grad_(True),
    ]
    impure: list[Callable[..., Any]] = [
        lambda module, args, output: seen.append(output),
        lambda module, args, output: print(output.shape),
        lambda module, args, output: output * output.mean().item(),
        lambda module, args, output: module.seen.add(output),
        functools.partial(with_state, factor=3.0),
        with_state,
        stores,
        seen.append,
    ]
    assert all(map(is_pure, pure)) and not any(map(is_pure, impure))
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(pure[0])
    assert not has_python_hooks(layer) and has_python_hooks(layer, pure_too=True)
    layer.register_full_backward_hook(lambda *_: None)
    assert has_python_hooks(layer)


def register(model: Any, kind: str, seen: list[torch.Tensor]) -> Any:
    """Register a hook of this kind on a submodule; returns its handle."""
    layer = model.model.layers[0]
    if kind == "pure":
        return layer.mlp.register_forward_hook(lambda module, args, output: output * 2)
    if kind == "reads":
        return layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    if kind == "changes":  # and captures what it changes with, which changes too

        def steer(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            seen.append(kwargs["position_ids"])
            return (output[0] + len(seen), *output[1:])

        return layer.self_attn.register_forward_hook(steer, with_kwargs=True)
    if kind == "pre":

        def double(module: nn.Module, args: Any, kwargs: Any) -> Any:
            seen.append(args[0])
            return (args[0] * 2, *args[1:]), kwargs

        return layer.register_forward_pre_hook(double, with_kwargs=True)

    def record(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, nn.Linear):
            seen.append(output)
            return output * 0.5
        return None

    if kind == "global":
        return register_module_forward_hook(record)

    def halve(module: nn.Module, args: Any) -> Any:
        if not isinstance(module, nn.Linear):
            return None
        seen.append(args[0])
        return (args[0] * 0.5,)

    assert kind == "global pre"
    return register_module_forward_pre_hook(halve)


def hook_and_unhook(folder: str, compile: Any, kinds: list[str]) -> dict[str, Any]:
    """Errors before, with and without each hook, called twice with it; and how often programs were compiled."""
    (model, ctx), unsharded = parallel(folder, compile=compile), reference(folder)
    ids, _ = batch(256)
    found: dict[str, Any] = {}

    def error() -> float:
        return max_difference(model(input_ids=ids).logits, expected())

    def expected() -> torch.Tensor:
        return unsharded(input_ids=ids).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        plain = expected()
        errors, compiled = [error()], ctx.compile_times
        for kind in kinds:
            seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            results: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            for one, values, logits in zip((model, unsharded), seen, results, strict=True):
                handle = register(one, kind, values)
                logits.extend(one(input_ids=ids).logits for _ in range(2))
                handle.remove()
            errors += [max_difference(a, b) for a, b in zip(results[0], results[1], strict=True)]
            errors += [max_difference(a, b) for a, b in zip(seen[0], seen[1], strict=True)]
            found[kind] = (len(seen[0]), max_difference(results[1][0], plain) > 1e-3)
            before = ctx.compile_times
            errors.append(error())
            compiled += ctx.compile_times - before
    return {"errors": errors, "found": found, "without hooks": compiled}


@pytest.mark.parametrize(
    ("compile", "kinds"),
    [
        (None, ["pure", "reads", "changes", "pre", "global", "global pre"]),
        ("inductor", ["pure", "changes"]),
        pytest.param("inductor", ["reads", "pre", "global", "global pre"], marks=pytest.mark.long),
    ],
)
def test_hooks_registered_and_removed_after_the_first_call(
    ranks: Any, checkpoints: Any, compile: Any, kinds: list[str]
) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for result in ranks(2).run(hook_and_unhook, folder, compile, kinds):
        assert max(result["errors"]) < 1e-4
        assert result["without hooks"] == 1, "the program without hooks is used again"
        calls = {"pure": 0, "reads": 2, "changes": 2, "pre": 2, "global": 16, "global pre": 16}
        assert result["found"] == {kind: (calls[kind], kind != "reads") for kind in kinds}


def hook_on_one_rank(folder: str) -> str:
    """The error of this rank, where only rank 1 has a hook."""
    model, _ = parallel(folder)
    if dist.get_rank() == 1:
        model.lm_head.register_forward_hook(print)
    with pytest.raises(RuntimeError) as caught:
        model(input_ids=batch(256)[0])
    return str(caught.value)


def test_hooks_on_one_rank_are_refused_on_all(ranks: Any, checkpoints: Any) -> None:
    for message in ranks(2).run(hook_on_one_rank, checkpoints("llama", num_hidden_layers=1)):
        assert "rank 0 that of the model, rank 1 that of model" in message and "alike on every rank" in message


def backward_hooks(folder: str, compile: Any, everywhere: bool) -> list[float]:
    """Errors of the gradients that a full backward hook sees, and of a step in which it halves them.

    The hook is that of one module, or of all in the process and halves the gradients of linear layers.
    """
    (model, _), unsharded = parallel(folder, compile=compile), reference(folder)
    ids, labels = batch(256)
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    grads: list[torch.Tensor] = []
    for one, values in zip((model, unsharded), seen, strict=True):
        one.train()
        one(input_ids=ids, labels=labels)

        def halve(module: Any, inputs: Any, outputs: Any, values: list[torch.Tensor] = values) -> Any:
            if everywhere and not isinstance(module, nn.Linear):
                return None
            values.extend([*inputs, *outputs])
            return (inputs[0] * 0.5,)

        mlp = one.model.layers[0].mlp
        register = register_module_full_backward_hook if everywhere else mlp.register_full_backward_hook
        handle = register(halve)
        one(input_ids=ids, labels=labels).loss.backward()
        handle.remove()
        grad = one.model.layers[0].self_attn.o_proj.weight.grad
        grads.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    assert len(seen[0]) == len(seen[1]) == (16 if everywhere else 2)
    return [max_difference(a, b) for a, b in [*zip(*seen, strict=True), (grads[0], grads[1])]]


@pytest.mark.parametrize(
    ("compile", "everywhere"),
    [
        (None, False),
        pytest.param(None, True, marks=pytest.mark.long),
        pytest.param("inductor", False, marks=pytest.mark.long),
        pytest.param("inductor", True, marks=pytest.mark.long),
    ],
)
def test_full_backward_hook_sees_global_gradients(ranks: Any, checkpoints: Any, compile: Any, everywhere: bool) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for errors in ranks(2).run(backward_hooks, folder, compile, everywhere, timeout=600):
        assert max(errors) < 1e-5


def hook_while_generating(folder: str) -> dict[str, Any]:
    """Tokens and hidden states with a hook on a block."""
    (model, ctx), unsharded = parallel(folder), reference(folder)
    ids, _ = batch(256)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    counts, tokens, states = [], [], []
    for one in (model, unsharded):
        one.generate(ids, **options)
        shapes: list[Any] = []
        handle = one.model.layers[1].register_forward_hook(lambda m, a, o, shapes=shapes: shapes.append(o.shape))
        tokens.append(one.generate(ids, **options))
        with torch.no_grad():
            output = one(input_ids=ids, output_hidden_states=True, output_attentions=False)
        states.append(torch.stack(output.hidden_states))
        handle.remove()
        counts.append(shapes)
    return {
        "counts": counts,
        "tokens": torch.equal(*tokens),
        "states": max_difference(*states),
        "breaks": ctx.plan.breaks,
    }


def test_hooks_run_at_every_step_of_generation(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(hook_while_generating, checkpoints("llama")):
        assert found["counts"][0] == found["counts"][1] and len(found["counts"][0]) == 5
        assert found["tokens"] and found["states"] < 1e-4
        assert found["breaks"] == (), "a hook is no graph break of the model"
