"""Methods of a parallel model: conversions, ``state_dict`` and ``save_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import parallel, reference


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
