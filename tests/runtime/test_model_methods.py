"""Methods of a parallel model: conversions, ``state_dict`` and ``save_pretrained``."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import batch, context, max_difference, parallel, parallel_module, reference

from paraxis import parallelize_model


def use_methods(folder: str, target: str) -> dict[str, Any]:
    """What the methods return or raise."""
    model, _ = parallel(folder)
    with pytest.raises(ValueError, match="without push_to_hub") as refused:
        model.save_pretrained(target, push_to_hub=True)
    model.save_pretrained(target)
    return {
        "same": model.to("cpu") is model and model.float() is model,
        "refused": str(refused.value),
        "state": {name: type(value).__name__ for name, value in model.state_dict().items()},
        "compiled_call": model.get_compiled_call(None) == model.__call__,
        "class": type(model).__name__,
    }


def test_methods_of_a_parallel_model(ranks: Any, checkpoints: Any, tmp_path: Path) -> None:
    folder, target = checkpoints("llama-tied"), str(tmp_path / "saved")
    expected = reference(folder)
    for found in ranks(2).run(use_methods, folder, target):
        assert found["same"], "conversions that change nothing return the model"
        assert set(found["state"].values()) == {"DTensor"} and set(found["state"]) == set(expected.state_dict())
        assert found["class"] == type(expected).__name__
    saved = reference(target)
    assert all(torch.equal(p, q) for p, q in zip(saved.parameters(), expected.parameters(), strict=True))


def resize(folder: str, compile: Any) -> dict[str, Any]:
    """The errors of resizing a parallel model and a copy; then a model that was resized before."""
    model, _ = parallel(folder, compile=compile)
    unsharded, (ids, _) = reference(folder), batch(256)
    refused = []
    for one in (model, copy.deepcopy(model)):
        for options in ({"new_num_tokens": 259}, {"pad_to_multiple_of": 100, "mean_resizing": False}):
            with pytest.raises(RuntimeError) as caught:
                one.resize_token_embeddings(**options)
            refused.append(str(caught.value))
    same = model.resize_token_embeddings(256) is model.resize_token_embeddings() is model.get_input_embeddings()
    with torch.no_grad():
        errors = [max_difference(model(input_ids=ids).logits, unsharded(input_ids=ids).logits)]
        unsharded.resize_token_embeddings(259)
        resized = parallelize_model(copy.deepcopy(unsharded), context(), compile=compile, show_progress=False)
        errors.append(max_difference(resized(input_ids=ids + 3).logits, unsharded(input_ids=ids + 3).logits))
    return {"refused": refused, "same": same, "errors": errors, "size": resized.lm_head.weight.shape[0]}


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_token_embeddings_are_resized_before_parallelizing(ranks: Any, checkpoints: Any, compile: Any) -> None:
    for found in ranks(2).run(resize, checkpoints("llama-tied", num_hidden_layers=1), compile):
        for message, size in zip(found["refused"], [259, 300, 259, 300], strict=True):
            assert f"256 token embeddings are sharded by a plan: they cannot become {size}" in message
            assert f"resize_token_embeddings({size}); then parallelize_model" in message
        assert found["same"] and max(found["errors"]) < 1e-4 and found["size"] == 259


def pickles(folder: str) -> dict[str, str]:
    """What pickling raises; the state dict can be written, each rank's own."""
    model, _ = parallel(folder)
    ids, labels = batch(256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    found = {}
    for name, value in {
        "model": model,
        "layer": model.model.layers[0].mlp.up_proj,
        "block": model.model.layers[0],  # with hooks of transformers, which cannot be pickled
        "parameter": model.lm_head.weight,
        "optimizer": optimizer.state_dict(),
        "cache": cache,
    }.items():
        for write in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
            with pytest.raises(TypeError) as caught:
                write(value)
            found[f"{name} {len(found)}"] = str(caught.value)
    torch.save(model.state_dict(), io.BytesIO())
    return found


def test_pickling_says_what_to_do_instead(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(pickles, checkpoints("llama", num_hidden_layers=1)):
        assert len(found) == 12
        for name, message in found.items():
            assert message.startswith("cannot pickle") and "save_pretrained" in message and "save_state" in message
            assert ("the parameter 'lm_head.weight'" in message) == name.startswith("parameter"), message


class Factor(torch.nn.Module):
    """A module whose forward reads an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.factor = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).relu()) * self.factor
        return result


def copy_shallowly(folder: str, compile: Any) -> dict[str, Any]:
    """What a shallow copy with an attribute of its own computes, and the original beside it."""
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    model, unsharded, _ = parallel_module(Factor, x, compile=compile)
    with torch.no_grad():
        model(x)
        twin, plain = copy.copy(model), copy.copy(unsharded)
        twin.factor = plain.factor = 3.0
        errors = [max_difference(twin(x), plain(x)), max_difference(model(x), unsharded(x))]
        for one in (twin, plain):  # of both the original and the copy
            one.down.bias.fill_(0.5)
        errors += [max_difference(twin(x), plain(x)), max_difference(model(x), unsharded(x))]
    text, _ = parallel(folder, compile=compile)
    again = copy.copy(text)
    ids, _ = batch(256)
    options = {"max_new_tokens": 4, "do_sample": False}
    return {
        "errors": errors,
        "shared": twin.up is model.up and again.lm_head.weight is text.lm_head.weight,
        "tokens": torch.equal(again.generate(ids, **options), reference(folder).generate(ids, **options)),
        "again": copy.copy(twin).factor,
    }


@pytest.mark.parametrize("compile", [None, pytest.param("inductor", marks=pytest.mark.long)])
def test_a_shallow_copy_has_attributes_of_its_own(ranks: Any, checkpoints: Any, compile: Any) -> None:
    for found in ranks(2).run(copy_shallowly, checkpoints("llama"), compile, timeout=300):
        assert max(found["errors"]) < 1e-5 and found["shared"] and found["tokens"] and found["again"] == 3.0, found
