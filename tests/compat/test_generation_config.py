"""``generate`` prepares the configuration of a repeated call as transformers does, with less work."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models.tiny import build
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from paraxis.compat import generation_config
from paraxis.compat.generation_config import MAX_KINDS, Contents, install_prepared_configs

IDS = torch.tensor([[5, 6, 7]])
plain: Callable[..., Any]


@pytest.fixture(autouse=True)
def own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' method: other tests may have installed ours."""
    global plain
    found = GenerationMixin._prepare_generation_config
    plain = getattr(found, "__wrapped__", found)
    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", plain)


class Counted:
    """A model that prepares its configurations again, and how often transformers' own method was called for it."""

    def __init__(self, **options: Any) -> None:
        self.model, self.count = build("llama", num_hidden_layers=1, **options), 0
        original = GenerationMixin._prepare_generation_config

        def counting(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(model, *args, **kwargs)

        with patch.object(GenerationMixin, "_prepare_generation_config", counting):
            install_prepared_configs(self.model)
            ours = GenerationMixin._prepare_generation_config
        GenerationMixin._prepare_generation_config = ours  # the fixture undoes it

    def prepare(self, passed: Any = None, **kwargs: Any) -> int:
        """Prepare, compare with transformers' own result, and return how often that was called."""
        before = self.count
        config, others = self.model._prepare_generation_config(passed, **kwargs)
        own, expected = plain(self.model, passed, **kwargs)
        assert vars(config) == vars(own) and list(vars(config)) == list(vars(own))
        assert [*others] == [*expected] and all(others[name] is expected[name] for name in others)
        assert all(type(value) is type(vars(own)[name]) for name, value in vars(config).items())
        config.max_length, others["added"] = 7777, 1  # which is up to the caller
        for value in vars(config).values():
            if isinstance(value, list):
                value.append(7777)
        return self.count - before


def test_equal_arguments_are_prepared_once() -> None:
    counted = Counted()
    options: list[dict[str, Any]] = [
        {},
        {"max_new_tokens": 3},
        {"max_new_tokens": 4},
        {"max_new_tokens": True},
        {"do_sample": True, "temperature": 0.5, "eos_token_id": [1, 2]},
        {"eos_token_id": (1, 2)},
        {"output_attentions": True, "attention_mask": IDS, "max_new_tokens": 3},
        {"attention_mask": IDS, "output_hidden_states": True},
        {"sequence_bias": {(1, 2): 0.5}},
    ]
    for expected in (1, 0, 0):
        for each in options:
            assert counted.prepare(**copy.deepcopy(each)) == expected, each  # lists become part of it
    assert counted.prepare(attention_mask=IDS + 1, output_hidden_states=True) == 0, "not part of the configuration"


def test_other_kinds_of_calls_are_prepared_every_time() -> None:
    counted = Counted()
    for _ in range(2):
        assert counted.prepare(GenerationConfig(max_length=5)) == 1, "somebody may change it"
        assert counted.prepare(eos_token_id=torch.tensor([1, 2])) == 1
    for length in range(1, MAX_KINDS + 3):
        counted.prepare(max_new_tokens=length)
    assert counted.prepare(max_new_tokens=1) == 1 and counted.prepare(max_new_tokens=MAX_KINDS + 2) == 0


def nested(config: Any) -> None:
    config.rope_parameters["rope_theta"] = 5.0


CHANGES: dict[str, Callable[[Any], None]] = {
    "generation config": lambda model: setattr(model.generation_config, "top_k", 7),
    "in a list of it": lambda model: model.generation_config.eos_token_id.append(9),
    "an attribute of the user's": lambda model: setattr(model.generation_config, "own", [1]),
    "one that is gone": lambda model: delattr(model.generation_config, "own_too"),
    "another one": lambda model: setattr(model, "generation_config", GenerationConfig(top_k=3)),
    "config": lambda model: setattr(model.config, "hidden_act", "gelu"),
    "in a dictionary of it": lambda model: nested(model.config),
    "another config": lambda model: setattr(model, "config", copy.deepcopy(model.config)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_seen(what: str) -> None:
    counted = Counted()
    counted.model.generation_config.eos_token_id = [1, 2]
    counted.model.generation_config.own_too = 3
    assert counted.prepare(max_new_tokens=3) == 1 and counted.prepare(max_new_tokens=3) == 0
    CHANGES[what](counted.model)
    assert counted.prepare(max_new_tokens=3) == 1, what
    assert counted.prepare(max_new_tokens=3) == 0


def test_parameters_in_the_config_are_refused_still() -> None:
    counted = Counted()
    counted.prepare(max_new_tokens=3)
    counted.model.config.num_beams = 2
    for _ in range(2):
        with pytest.raises(ValueError, match="modified the pretrained model configuration"):
            counted.model._prepare_generation_config(None, max_new_tokens=3)
    del counted.model.config.num_beams
    assert counted.prepare(max_new_tokens=3) == 1


def test_objects_of_unknown_kinds_prevent_reuse() -> None:
    counted = Counted()
    counted.model.config.own = object()
    assert counted.prepare() == 1 and counted.prepare() == 1
    del counted.model.config.own
    counted.model.generation_config.__class__ = type("Own", (GenerationConfig,), {})
    assert counted.prepare() == 1 and counted.prepare() == 1
    assert Contents.of(({"a": [1, {2: (3,)}]},)) is not None and Contents.of(([object()],)) is None


def test_models_with_a_method_of_their_own_keep_it() -> None:
    model = build("llama", num_hidden_layers=1)
    model._prepare_generation_config = lambda *args, **kwargs: "own"
    install_prepared_configs(model)
    assert model not in generation_config._prepared
    install_prepared_configs(torch.nn.Linear(2, 2))


def test_models_do_not_stay_alive_and_others_are_left_alone() -> None:
    counted = Counted()
    other = build("llama", num_hidden_layers=1)
    assert counted.prepare() == 1 and counted.prepare() == 0
    other._prepare_generation_config(None)
    other._prepare_generation_config(None)
    assert counted.count == 3
    expected = other.generate(IDS, max_new_tokens=3)
    install_prepared_configs(other)
    assert all(torch.equal(other.generate(IDS, max_new_tokens=3), expected) for _ in range(2))
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
