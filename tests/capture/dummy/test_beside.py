"""Arguments beside token ids and modalities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paraxis.capture.dummy.beside import add_beside, missing_ones
from paraxis.capture.dummy.facts import Facts


class Model(nn.Module):
    """Has arguments of several kinds; one is required, of another nothing is known."""

    config = SimpleNamespace()

    def forward(
        self,
        qformer_input_ids: Any,
        strange: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        mm_token_type_ids: Any = None,
        bbox: Any = None,
    ) -> None: ...


def test_known_arguments_are_added() -> None:
    facts = Facts(Model(), 2, 8, torch.device("cpu"))
    ids = torch.ones(2, 5, dtype=torch.int64)
    places = {"video": torch.tensor([[False, True, True, False, False]] * 2)}
    inputs: dict[str, Any] = {"input_ids": ids}
    add_beside(facts, inputs, places, ())
    assert inputs["mm_token_type_ids"].tolist() == [[0, 2, 2, 0, 0]] * 2
    assert inputs["bbox"].shape == (2, 5, 4) and inputs["qformer_input_ids"].shape == (2, 8)
    assert "attention_mask" not in inputs  # it is not required
    assert missing_ones(facts, inputs) == ["strange"]
    add_beside(facts, inputs, places, ("attention_mask",))
    assert inputs["attention_mask"].shape == ids.shape


def test_kinds_of_tokens_need_placeholders() -> None:
    inputs: dict[str, Any] = {"input_ids": torch.ones(2, 5, dtype=torch.int64)}
    add_beside(Facts(Model(), 2, 8, torch.device("cpu")), inputs, {}, ())
    assert "mm_token_type_ids" not in inputs


def test_images_of_another_part_have_its_size() -> None:
    facts = Facts(Companion(), 2, 8, torch.device("cpu"))
    inputs = {"pixel_values": torch.zeros(2, 3, 16, 16)}
    add_beside(facts, inputs, {}, ())
    assert inputs["high_res_pixel_values"].shape == (2, 3, 32, 32)
    assert inputs["prompt_pixel_values"].shape == (2, 3, 16, 16)
    text: dict[str, torch.Tensor] = {}
    add_beside(facts, text, {}, ())
    assert not text


class High(SimpleNamespace):
    """A configuration inside another one."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class Companion(nn.Module):
    """Takes images for two more parts, of which one has a size of its own."""

    config = SimpleNamespace(image_size=16, high_res_vision_config=High(image_size=32))

    def forward(
        self, pixel_values: Any = None, high_res_pixel_values: Any = None, prompt_pixel_values: Any = None
    ) -> None: ...
