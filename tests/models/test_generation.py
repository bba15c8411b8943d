"""``generate`` in its modes, against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from models.tiny import save

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def handed_in(model: Any, ids: torch.Tensor) -> list[Any]:
    """A cache of the user's, filled by a call of the model and then given to ``generate``."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    return model.generate(torch.cat([ids, ids[:, :3]], 1), past_key_values=cache, **NEW).tolist()


def conversation(model: Any, ids: torch.Tensor) -> list[Any]:
    """A second turn on the cache of the first."""
    first = model.generate(ids, return_dict_in_generate=True, **NEW)
    more = torch.cat([first.sequences, ids[:, :4]], 1)
    return model.generate(more, past_key_values=first.past_key_values, **NEW).tolist()


def padded(model: Any, ids: torch.Tensor) -> list[Any]:
    """A batch in which one prompt is shorter."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return model.generate(ids, attention_mask=mask, **NEW).tolist()


def modes(assistant: Any) -> dict[str, Callable[[Any, torch.Tensor], list[Any]]]:
    return {
        "static cache": lambda m, ids: m.generate(ids, cache_implementation="static", **NEW).tolist(),
        "beams": lambda m, ids: m.generate(ids, num_beams=3, **NEW).tolist(),
        "padded": padded,
        "assisted": lambda m, ids: m.generate(ids[:1], assistant_model=assistant, **NEW).tolist(),
        "handed in": handed_in,
        "conversation": conversation,
    }


def generated(folder: str, which: tuple[str, ...]) -> dict[str, Any]:
    """What differs on this rank, and which part of the heads a cache has here."""
    from models.compare import batch, parallel, reference

    (model, _), unsharded = parallel(folder), reference(folder)
    model.eval()
    ids = batch(unsharded.config.vocab_size)[0]
    differ = []
    for name in which:
        run = modes(unsharded)[name]
        expected = run(unsharded, ids)
        if run(model, ids) != expected:
            differ.append(name)
    heads = {}
    for name, options in {"beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}.items():
        cache = model.generate(ids, return_dict_in_generate=True, **options, **NEW).past_key_values
        heads[name] = cache.layers[0].keys._local.shape[1] / unsharded.config.num_key_value_heads
    return {"differ": differ, "heads": heads}


@pytest.mark.parametrize(
    "which",
    [("conversation",), pytest.param(("static cache", "beams", "padded", "assisted", "handed in"), marks=long)],
    ids=["one", "the others"],
)
def test_every_mode(ranks: Any, tmp_path: Path, which: tuple[str, ...]) -> None:
    for found in ranks(2).run(generated, save("llama-tied", tmp_path), which, timeout=300):
        assert not found["differ"]
        assert found["heads"] == {"beams": 0.5, "static": 0.5}, "a cache holds local heads only"
