"""transformers' ``generate``: where its loop is looked up, and what its processors, criteria and caches are."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import build
from torch import nn
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import GenerationMixin

from paraxis.compat import generation

IDS = torch.tensor([[5, 6, 7]])


def test_generate_runs_the_loop_of_this_object_only() -> None:
    model = build("llama", num_hidden_layers=1)
    expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
    seen: list[Any] = []

    def loop(model: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(model)
        return plain(*args, **kwargs)

    generation.install_sampling_loop(model, loop)
    generation.install_sampling_loop(model, loop)  # which installs it once
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), expected) and seen == [model]
    copy.deepcopy(model).generate(IDS, max_new_tokens=1, do_sample=False)
    model.generate(IDS, max_new_tokens=1, do_sample=False, num_beams=2)
    assert len(seen) == 1, "a copy, and beams, run transformers' own"
    assert "stopping_criteria" in inspect.signature(GenerationMixin._sample).parameters
    gone = weakref.ref(model)
    seen.clear()
    del model
    gc.collect()
    assert gone() is None


def test_every_processor_of_the_list_exists() -> None:
    missing = [name for name in generation._PROCESSORS if not hasattr(processors, name)]
    assert not missing, "a name that transformers does not have has no effect"
    assert set(generation._OF_SCORES) <= set(generation._PROCESSORS)


def test_processors_are_known_by_their_class() -> None:
    eos = torch.tensor([2])
    minimum = processors.MinNewTokensLengthLogitsProcessor(3, 4, eos)
    assert generation.are_pure([minimum, processors.TemperatureLogitsWarper(0.5)])
    assert not generation.are_pure([processors.PrefixConstrainedLogitsProcessor(lambda *args: [1], 1)])

    class Own(processors.TemperatureLogitsWarper):
        """A class of the user."""

    assert not generation.are_pure([Own(0.5)])
    assert generation.depends_on_scores_alone(processors.TopKLogitsWarper(4))
    assert not generation.depends_on_scores_alone(minimum)
    assert generation.minimum_length_of(minimum) == 7
    assert generation.minimum_length_of(processors.MinLengthLogitsProcessor(5, eos)) == 5
    assert generation.minimum_length_of(processors.TopKLogitsWarper(4)) is None
    assert generation.is_repetition_penalty(processors.RepetitionPenaltyLogitsProcessor(1.5))
    scores = torch.randn(1, 9)
    for length, forbidden in ((6, True), (7, False)):
        assert bool(minimum(torch.zeros(1, length, dtype=torch.long), scores)[0, 2].isinf()) is forbidden


@pytest.mark.parametrize("name", generation._OF_SCORES)
def test_processors_of_scores_do_not_look_at_tokens(name: str) -> None:
    arguments: dict[str, Any] = {"EtaLogitsWarper": (0.1,), "SuppressTokensLogitsProcessor": ([1, 2],)}
    values: dict[str, Any] = {"TopKLogitsWarper": (3,), "InfNanRemoveLogitsProcessor": (), "LogitNormalization": ()}
    each = getattr(processors, name)(*{**arguments, **values}.get(name, (0.5,)))
    each(None, torch.randn(2, 12))


def test_criteria_by_kind() -> None:
    found = generation.split_criteria([criteria.MaxLengthCriteria(5), criteria.EosTokenCriteria(2)])
    assert found is not None and len(found["length"]) == 1 and len(found["eos"]) == 1 and not found["time"]
    assert generation.split_criteria([lambda ids, scores: None]) is None
    assert generation.time_is_up(criteria.MaxTimeCriteria(5.0, time.time() - 6))
    assert not generation.time_is_up(criteria.MaxTimeCriteria(60.0))


def test_caches_that_generate_makes() -> None:
    config = build("llama", num_hidden_layers=1).config
    cache = DynamicCache(config=config)
    assert generation.is_new_dynamic_cache(cache) and not generation.is_new_dynamic_cache(None)
    states = torch.ones(1, 4, 2, 8)
    cache.update(states, states, 0)
    assert not generation.is_new_dynamic_cache(cache)
    ((keys, _, window),) = generation.take_states(cache)
    assert torch.equal(keys, states) and window is None
    assert generation.is_new_dynamic_cache(cache)
    generation.fill_dynamic_cache(cache, [(states, states)], 2)
    assert cache.get_seq_length() == 2
    cache._is_user_defined = True
    assert not generation.is_new_dynamic_cache(cache)


@pytest.mark.parametrize(
    ("name", "overrides", "plain"),
    [("llama", {}, True), ("gemma2", {}, True), ("gemma2", {"layer_types": ["chunked_attention"] * 2}, False)],
)
def test_layers_with_a_plain_cache(name: str, overrides: dict[str, Any], plain: bool) -> None:
    from models.tiny import config

    assert generation.has_plain_layers(config(name, **overrides)) is plain


def settings_in(folder: Path, model: Any, chosen: Any = None) -> Any:
    """What a model's settings become."""
    generation.load_generation_settings(model, folder, chosen)
    return model.generation_config


def test_settings_come_from_the_directory_as_from_pretrained_reads_them(tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=1)
    model.generation_config.no_repeat_ngram_size = 7
    model.save_pretrained(tmp_path)
    plain = lambda: type(model).from_pretrained(tmp_path).generation_config  # noqa: E731
    assert settings_in(tmp_path, build("llama", num_hidden_layers=1)) == plain() and plain().no_repeat_ngram_size == 7
    chosen = GenerationConfig(no_repeat_ngram_size=3)
    assert settings_in(tmp_path, build("llama", num_hidden_layers=1), chosen) == chosen
    # without a file, old settings in the configuration count
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_beams": 3}))
    assert settings_in(tmp_path, build("llama", num_hidden_layers=1)) == plain() and plain().num_beams == 3
    generation.load_generation_settings(nn.Linear(2, 2), tmp_path)  # which cannot generate: nothing happens


def test_settings_may_be_of_the_kind_that_the_class_of_the_model_has(tmp_path: Path) -> None:
    class Settings(GenerationConfig):
        pass

    class Model(LlamaForCausalLM):
        generation_config_class = Settings

        def adjust_generation_fn(self, generation_config: Any, pretrained_model_name_or_path: Any, **kw: Any) -> None:
            self.generation_config = Settings.from_pretrained(pretrained_model_name_or_path)

    model = Model(build("llama", num_hidden_layers=1).config)
    model.generation_config.no_repeat_ngram_size = 7
    model.save_pretrained(tmp_path)
    found = settings_in(tmp_path, Model(model.config))
    assert type(found) is Settings and found.no_repeat_ngram_size == 7
