"""Full models that run the programs of their first blocks, against the unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch
from helpers import later_blocks as later
from helpers.outlined_calls import outlined_calls
from models.compare import full, max_difference, parallel, reference, same_tokens, step_errors
from models.tiny import build
from torch import nn

from paraxis.runtime.block_programs import BlockPrograms, find_block_programs

IDS = torch.randint(3, 256, (2, 10), generator=torch.Generator().manual_seed(7))
PIECES = ["Head", "Body", "Tail"]
DEPTHS = {"llama": {"num_hidden_layers": 6}, "gemma2": {"num_hidden_layers": 8}, "gpt2": {"n_layer": 6}}
DEPTHS["mixtral"] = DEPTHS["llama"]


def static_cache(model: Any, capacity: int = 16) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=capacity)


def cache_error(found: Any, expected: Any) -> float:
    """The largest error in a layer of a KV cache, and infinite if the layers differ in anything but their tensors."""
    errors = []
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        errors += [max_difference(full(getattr(ours, n)), getattr(theirs, n)) for n in ("keys", "values")]
        for name, value in vars(theirs).items():
            same = value == getattr(ours, name) if isinstance(value, (int, bool, str, torch.dtype)) else True
            errors.append(0.0 if same else float("inf"))
    return max(errors)


def call_in_many_ways(folder: str, way: str, eager: bool = True) -> Any:
    """By kind of call: the errors, and whether the first blocks' programs ran; and all graphs that were compiled."""
    found: dict[str, tuple[float, bool]] = {}
    with outlined_calls(eager) as seen, torch.no_grad():
        model, _ = parallel(folder, compile="inductor")
        unsharded = reference(folder)

        def call(what: str, ids: torch.Tensor, caches: Any = None, **options: Any) -> Any:
            passed = [{"past_key_values": cache} for cache in caches] if caches else [{}, {}]
            results = [m(ids, **options, **own) for m, own in zip((model, unsharded), passed, strict=True)]
            found[what] = max_difference(results[0].logits, results[1].logits), seen.ran_outlined()
            return [result.past_key_values for result in results]

        if way == "no cache":
            mask = torch.ones(3, 7, dtype=torch.int64)
            mask[1, :3] = 0
            call("two rows", IDS, use_cache=False)
            call("three rows", IDS[:1].repeat(3, 1)[:, :7], use_cache=False)
            call("padded", IDS[:1].repeat(3, 1)[:, :7], use_cache=False, attention_mask=mask)
        else:
            caches = [static_cache(m) for m in (model, unsharded)] if way == "static" else None
            caches = call("prefill", IDS, caches)
            call("step", IDS[:, :1], caches)
            call("next step", IDS[:, 1:2], caches)
            found["cache"] = cache_error(*caches), True
            # With a static cache of the same capacity as above.
            options = {"cache_implementation": "static", "max_new_tokens": 7} if way == "static" else {}
            right = same_tokens(model, unsharded, IDS, 4, **options)
            found["tokens"] = 0.0 if right else float("inf"), seen.outlined >= 4
    return found, seen.pieces, seen.refused


def assert_right_and_outlined(results: Any) -> None:
    for found, pieces, refused in results:
        assert {way: error for way, (error, _) in found.items() if not error < 1e-4} == {}
        assert [way for way, (_, outlined) in found.items() if not outlined] == []
        assert refused == 0 and len(pieces) % 3 == 0 and pieces == PIECES * (len(pieces) // 3)


@pytest.mark.parametrize("way", ["no cache", "dynamic", "static"])
def test_every_kind_of_call_runs_the_first_blocks_for_all(way: str, ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama", **DEPTHS["llama"])
    assert_right_and_outlined(ranks(1).run(call_in_many_ways, folder, way, timeout=500))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gemma2", "dynamic"),
        pytest.param("gpt2", "dynamic", marks=pytest.mark.long),
        pytest.param("mixtral", "dynamic", marks=pytest.mark.long),
        pytest.param("gemma2", "static", marks=pytest.mark.long),
        pytest.param("gpt2", "static", marks=pytest.mark.long),
        pytest.param("mixtral", "static", marks=pytest.mark.long),
    ],
)
def test_other_architectures_run_the_first_blocks_for_all(name: str, way: str, ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints(name, **DEPTHS[name])
    assert_right_and_outlined(ranks(1).run(call_in_many_ways, folder, way, timeout=500))


@pytest.mark.parametrize("way", ["dynamic", pytest.param("static", marks=pytest.mark.long)])
def test_ranks_run_the_first_blocks_compiled_by_inductor(way: str, ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama", **DEPTHS["llama"])
    assert_right_and_outlined(ranks(2).run(call_in_many_ways, folder, way, eager=False, timeout=600))


def call_with_other_caches(folder: str) -> list[float]:
    """Errors with static caches of several capacities."""
    errors = []
    with outlined_calls() as seen, torch.no_grad():
        model, _ = parallel(folder, compile="inductor")
        unsharded = reference(folder)
        for capacity in (16, 24, 32):
            caches = [static_cache(m, capacity) for m in (model, unsharded)]
            for ids in (IDS, IDS[:, :1]):
                found, expected = (m(ids, past_key_values=c).logits for m, c in zip((model, unsharded), caches))
                errors.append(max_difference(found, expected))
            errors.append(cache_error(*caches))
        assert seen.outlined
    return errors


@pytest.mark.long
def test_caches_of_other_capacities_give_the_same_results(ranks: Any, checkpoints: Any) -> None:
    (errors,) = ranks(1).run(call_with_other_caches, checkpoints("llama", **DEPTHS["llama"]), timeout=500)
    assert max(errors) < 1e-4


def generate_with_recurrent_states(folder: str) -> tuple[bool, list[float]]:
    """Whether tokens are the unsharded model's, and the errors of logits: the cache's layers hold dictionaries."""
    model, _ = parallel(folder)
    unsharded, errors = reference(folder), []
    with torch.no_grad():
        first, expected = model(IDS), unsharded(IDS)
        errors.append(max_difference(first.logits, expected.logits))
        options = [{"cache_params": first.cache_params}, {"cache_params": expected.cache_params}]
        steps = [m(IDS[:, :1], **own) for m, own in zip((model, unsharded), options, strict=True)]
        errors.append(max_difference(steps[0].logits, steps[1].logits))
    return same_tokens(model, unsharded, IDS, 6), errors


def test_caches_with_more_than_tensors_run_the_full_program(ranks: Any, checkpoints: Any) -> None:
    """What a call changes in a dictionary of a layer is not seen: the layers of later blocks would miss it."""
    ((same, errors),) = ranks(1).run(generate_with_recurrent_states, checkpoints("mamba", num_hidden_layers=6))
    assert same and max(errors) < 1e-4


def return_hidden_states(folder: str) -> tuple[list[float], int]:
    with outlined_calls(), torch.no_grad():
        model, _ = parallel(folder, compile="inductor")
        found, expected = (
            m(IDS, use_cache=False, output_hidden_states=True).hidden_states for m in (model, reference(folder))
        )
    return [max_difference(a, b) for a, b in zip(found, expected, strict=True)], len(found)


def test_results_of_every_block_are_returned(ranks: Any, checkpoints: Any) -> None:
    ((errors, count),) = ranks(1).run(return_hidden_states, checkpoints("llama", **DEPTHS["llama"]), timeout=500)
    assert count == 7 and max(errors) < 1e-4


def compile_deep(folder: str) -> tuple[float, list[str]]:
    with outlined_calls() as seen, torch.no_grad():
        model, _ = parallel(folder, compile="inductor")
        error = max_difference(model(IDS).logits, reference(folder)(IDS).logits)
    return error, seen.pieces


def test_as_much_is_compiled_for_24_layers_as_for_12(ranks: Any, checkpoints: Any) -> None:
    for layers in (12, 24):
        ((error, pieces),) = ranks(1).run(compile_deep, checkpoints("llama", num_hidden_layers=layers), timeout=500)
        assert error < 1e-4 and pieces == PIECES


def train_after_inference(folder: str) -> tuple[dict[str, float], list[bool], list[str]]:
    """Errors of a training step, whether first blocks' programs ran before, in and after it, and what was compiled."""
    with outlined_calls() as seen:
        model, _ = parallel(folder, compile="inductor")
        unsharded, outlined = reference(folder), []
        with torch.no_grad():
            model(IDS, use_cache=False)
        outlined.append(seen.ran_outlined())
        errors = step_errors(model, unsharded, {"input_ids": IDS, "labels": IDS, "use_cache": False})
        outlined.append(seen.ran_outlined())
        with torch.no_grad():
            errors["after"] = max_difference(model(IDS, use_cache=False).logits, unsharded(IDS, use_cache=False).logits)
        outlined.append(seen.ran_outlined())
    return errors, outlined, seen.pieces


def test_training_runs_the_full_program(ranks: Any, checkpoints: Any) -> None:
    ((errors, outlined, pieces),) = ranks(1).run(
        train_after_inference, checkpoints("llama", **DEPTHS["llama"]), timeout=500
    )
    assert max(errors.values()) < 1e-4
    assert outlined == [True, False, True] and len(pieces) == 4, "one program more, of the full model"


# -- which calls run these programs, and when they do not hold any more ---------------------------------------------


def block_programs(name: str = "llama") -> tuple[Any, BlockPrograms]:
    model = build(name, **DEPTHS[name])
    found = find_block_programs(model)
    assert found is not None
    return model, found


def filled_cache(model: Any, static: bool) -> Any:
    from transformers import DynamicCache

    cache = static_cache(model) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


def test_calls_with_gradients_or_unknown_arguments_run_the_full_program() -> None:
    _, programs = block_programs()
    assert not programs.takes((IDS,), {}), "gradients are computed"
    with torch.no_grad():
        assert programs.takes((IDS,), {"use_cache": False, "more": [1, {"x": IDS}]})
        assert not programs.takes((IDS,), {"more": object()})
        programs.refuse((IDS,), {"use_cache": False})
        assert not programs.takes((IDS[:, :5],), {"use_cache": False}) and programs.takes((IDS,), {})


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_caches_with_layers_that_differ_run_the_full_program(name: str, static: bool) -> None:
    model, programs = block_programs(name)
    cache = filled_cache(model, static)
    with torch.no_grad():
        assert programs.takes((IDS,), {"past_key_values": cache})
        assert not programs.takes((IDS, cache), {"past_key_values": cache})
        last = cache.layers.pop()
        assert not programs.takes((IDS,), {"past_key_values": cache})
        cache.layers.append(last)
        last.is_initialized = False
        assert not programs.takes((IDS,), {"past_key_values": cache})
        last.is_initialized = True
        cache.layers[-1] = copy(last)
        assert programs.takes((IDS,), {"past_key_values": cache})
        cache.layers[-1].__class__ = type("Other", (type(last),), {})
        assert not programs.takes((IDS,), {"past_key_values": cache})
        cache.layers[-1] = last
        if static:
            last.max_cache_len += 1
            assert not programs.takes((IDS,), {"past_key_values": cache})


def set_training(model: Any) -> None:
    model.model.layers[4].train()


def set_new_attribute(model: Any) -> None:
    model.model.layers[4].mlp.note = [1]


def reset_attribute(model: Any) -> None:
    model.model.layers[4].self_attn.scaling = float(str(model.model.layers[4].self_attn.scaling))


def set_first_block(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.1


def set_outside(model: Any) -> None:
    model.lm_head = nn.Linear(64, 256)


def swap_unseen(model: Any) -> None:
    modules = model.model.layers._modules
    modules["4"], modules["5"] = modules["5"], modules["4"]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        *((getattr(later, name), True) for name in later.CHANGES),
        (set_training, True),
        (set_new_attribute, True),
        (swap_unseen, True),
        (reset_attribute, False),
        (later.scale_weight, False),
        (set_first_block, False),
        (set_outside, False),
    ],
)
def test_change_of_another_block_is_noticed(change: Callable[[Any], None], changed: bool) -> None:
    """What changes in the first blocks, or outside of them, is seen by guards."""
    model, programs = block_programs()
    assert not programs.changed()
    change(model)
    assert programs.changed() is changed


# -- what somebody changes on a later block -------------------------------------------------------------------------


def change_later_block(folder: str, change: Callable[[Any], None]) -> tuple[float, float, bool]:
    """The error after a change of both models, how much that changed, and whether first blocks' programs ran then."""
    with outlined_calls() as seen, torch.no_grad():
        model, _ = parallel(folder, compile="inductor")
        unsharded = reference(folder)
        before = model(IDS, use_cache=False).logits
        assert seen.ran_outlined()
        change(model)
        change(unsharded)
        expected = unsharded(IDS, use_cache=False).logits
        errors = [max_difference(model(IDS, use_cache=False).logits, expected) for _ in range(2)]
    return max(errors), max_difference(before, expected), seen.outlined == 2


@pytest.mark.parametrize(
    ("change", "outlined"),
    [
        (later.set_scaling, False),
        (later.register_hook, False),
        (later.scale_weight, True),
        (later.swap_blocks, False),
        pytest.param(later.set_eps, False, marks=pytest.mark.long),
        pytest.param(later.set_activation, False, marks=pytest.mark.long),
        pytest.param(later.replace_forward, False, marks=pytest.mark.long),
        pytest.param(later.replace_class, False, marks=pytest.mark.long),
        pytest.param(later.swap_projections, True, marks=pytest.mark.long),
        pytest.param(later.remove_block, True, marks=pytest.mark.long),
    ],
)
def test_change_of_a_later_block_after_the_first_call_is_seen(
    change: Callable[[Any], None], outlined: bool, ranks: Any, checkpoints: Any
) -> None:
    folder = checkpoints("llama", **DEPTHS["llama"])
    ((error, difference, ran),) = ranks(1).run(change_later_block, folder, change, timeout=500)
    assert error < 1e-4 < difference
    assert ran is outlined


def replace_module(folder: str, changes: list[Callable[[Any], None]]) -> list[str]:
    """What calling the model raises after each of these changes, on a model of its own."""
    found = []
    with outlined_calls() as seen, torch.no_grad():
        for change in changes:
            model, _ = parallel(folder, compile="inductor")
            model(IDS, use_cache=False)
            assert seen.ran_outlined()
            change(model)
            with pytest.raises(RuntimeError) as caught:
                model(IDS, use_cache=False)
            found.append(str(caught.value))
    return found


def test_parameters_that_no_plan_knows_are_refused_in_later_blocks_too(ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama", **DEPTHS["llama"])
    changes = [later.replace_parameter, later.replace_parameter_unseen, later.replace_block, later.replace_head]
    (found,) = ranks(1).run(replace_module, folder, changes, timeout=500)
    names = ["model.layers.4.mlp.up_proj.weight"] * 2 + ["model.layers.4.", "lm_head.weight"]
    for message, name in zip(found, names, strict=True):
        assert "the model now has parameters that the plan does not know" in message and name in message
