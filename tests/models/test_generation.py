"""``generate`` in its modes, against the unsharded model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.compare import batch, parallel, reference

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def own_cache(model: Any, ids: torch.Tensor) -> list[Any]:
    """The user's own cache, prefilled by a call of the model and then passed to ``generate``."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    return model.generate(torch.cat([ids, ids[:, :3]], 1), past_key_values=cache, **NEW).tolist()


def conversation(model: Any, ids: torch.Tensor) -> list[Any]:
    """A second turn, with the cache of the first."""
    first = model.generate(ids, return_dict_in_generate=True, **NEW)
    more = torch.cat([first.sequences, ids[:, :4]], 1)
    return model.generate(more, past_key_values=first.past_key_values, **NEW).tolist()


def padded(model: Any, ids: torch.Tensor) -> list[Any]:
    """A batch in which one prompt is shorter."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return model.generate(ids, attention_mask=mask, **NEW).tolist()


def modes(assistant: Any) -> dict[str, Callable[[Any, torch.Tensor], list[Any]]]:
    """The ways to generate, each a function of the model and the prompt."""
    return {
        "static cache": lambda m, ids: m.generate(ids, cache_implementation="static", **NEW).tolist(),
        "beams": lambda m, ids: m.generate(ids, num_beams=3, **NEW).tolist(),
        "padded": padded,
        "assisted": lambda m, ids: m.generate(ids[:1], assistant_model=assistant, **NEW).tolist(),
        "own cache": own_cache,
        "conversation": conversation,
    }


def generate_against_unsharded(folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The modes whose tokens differ on this rank, and the share of the heads that a KV cache holds here."""
    (model, _), unsharded = parallel(folder), reference(folder)
    model.eval()
    ids = batch(unsharded.config.vocab_size)[0]
    differ = []
    for name in names:
        run = modes(unsharded)[name]
        expected = run(unsharded, ids)
        if run(model, ids) != expected:
            differ.append(name)
    heads = {}
    for name, options in {"beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}.items():
        cache = model.generate(ids, return_dict_in_generate=True, **options, **NEW).past_key_values
        heads[name] = cache.layers[0].keys.to_local().shape[1] / unsharded.config.num_key_value_heads
    return {"differ": differ, "heads": heads}


@pytest.mark.parametrize(
    "names",
    [
        ("conversation",),
        pytest.param(("static cache", "beams", "padded", "assisted", "own cache"), marks=pytest.mark.long),
    ],
    ids=["conversation", "other modes"],
)
def test_tokens_equal_the_unsharded_models(ranks: Any, checkpoints: Any, names: tuple[str, ...]) -> None:
    for found in ranks(2).run(generate_against_unsharded, checkpoints("llama-tied"), names, timeout=300):
        assert not found["differ"]
        assert found["heads"] == {"beams": 0.5, "static": 0.5}, "a KV cache holds the local heads only"


def cache_bytes_before_and_after(folder: str) -> tuple[int, int]:
    """Bytes of 4-dimensional tensors other than parameters before generation and after it, its cache deleted."""
    model, _ = parallel(folder)
    ids = torch.arange(64)[None] % 90 + 3

    def count() -> int:
        gc.collect()
        own = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.device.type == "cpu" and t.dim() == 4
        }
        return sum(size for address, size in storages.items() if address not in own)

    before = count()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=4, do_sample=False)
    return before, count()


def test_the_kv_cache_is_freed_after_generation(ranks: Any, checkpoints: Any) -> None:
    for before, after in ranks(2).run(cache_bytes_before_and_after, checkpoints("llama")):
        assert after == before
