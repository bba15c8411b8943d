"""Scenes: the calls that a model is planned with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture.dummy.tiny_multimodal import IMAGE_TOKEN, llava, on_meta, whisper
from torch import nn

from paraxis.capture.dummy.facts import Facts
from paraxis.capture.dummy.scenes import NotDerived, dummy_scenes, text_scene


def scenes_of(model: nn.Module, length: int = 8) -> list[dict[str, Any]]:
    return list(dummy_scenes(Facts(model, 2, length, torch.device("cpu"))))


def test_as_many_image_tokens_as_features() -> None:
    image, text = scenes_of(on_meta(llava))
    assert image["pixel_values"].shape == (2, 3, 32, 32)
    assert (image["input_ids"] == IMAGE_TOKEN).sum(1).tolist() == [16, 16]
    assert image["input_ids"].shape[1] > 16  # and some text
    assert text.keys() == {"input_ids"} and not (text["input_ids"] == IMAGE_TOKEN).any()


def test_images_do_not_make_a_long_text_longer() -> None:
    image, _ = scenes_of(on_meta(llava), length=48)
    assert image["input_ids"].shape == (2, 48)


def test_the_number_of_features_depends_on_the_configuration() -> None:
    image, _ = scenes_of(on_meta(llava, vision_feature_select_strategy="full"))
    assert (image["input_ids"] == IMAGE_TOKEN).sum(1).tolist() == [17, 17]


def test_audio_fills_the_positions_of_the_encoder() -> None:
    (scene,) = scenes_of(on_meta(whisper))
    assert scene["input_features"].shape == (2, 16, 48) and scene["decoder_input_ids"].shape == (2, 8)
    (scene,) = scenes_of(on_meta(whisper), length=2048)
    assert scene["decoder_input_ids"].shape == (2, 32)  # no more than the decoder has positions


def test_text_is_no_placeholder() -> None:
    model = on_meta(llava)
    model.config.image_token_id = 1
    image, _ = scenes_of(model)
    assert (image["input_ids"] == 1).sum() == 32


class Strange(nn.Module):
    """Takes something that nothing is known of."""

    config = SimpleNamespace()
    main_input_name = "strange"

    def forward(self, strange: Any, pixel_values: Any = None) -> None: ...


def test_what_cannot_be_derived_is_said_with_what_to_pass() -> None:
    with pytest.raises(NotDerived, match=r"Strange could be derived .*required: strange.*pixel_values of shape \(2, 3"):
        scenes_of(Strange())
    assert text_scene(Facts(Strange(), 2, 8, torch.device("cpu"))) is None


class Reader(nn.Module):
    """Reads a question, and a protein if there is one; its class says that it takes images alone."""

    input_modalities = ("image",)

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=16, patch_size=8)
        self.words, self.patches = nn.Embedding(8, 4), nn.Conv2d(3, 4, 8, 8)

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        protein_input_ids: torch.Tensor | None = None,
        protein_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = self.words(input_ids)
        if pixel_values is not None:
            found = found + self.patches(pixel_values).flatten(1).mean(1)[:, None, None]
        if protein_input_ids is not None:
            assert protein_attention_mask is not None
            found = found + (self.words(protein_input_ids) * protein_attention_mask[..., None]).mean(1)[:, None]
        return found


def test_token_ids_go_with_images_where_the_model_needs_them() -> None:
    image, text, protein = scenes_of(Reader())
    assert image.keys() == {"pixel_values", "input_ids"} and text.keys() == {"input_ids"}
    assert protein.keys() == {"input_ids", "protein_input_ids", "protein_attention_mask"}


class Matcher(Reader):
    """Compares an image with a text, of which it reads the mask: the pair is right with both of them alone."""

    def forward(  # type: ignore[override]
        self, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        text = self.words(input_ids) * attention_mask[..., None]  # type: ignore[index]
        return (self.patches(pixel_values).flatten(1).mean(1)[:, None, None] * text).sum(-1)


def test_masks_go_with_token_ids_where_the_model_needs_them() -> None:
    (both,) = scenes_of(Matcher())
    assert both.keys() == {"pixel_values", "input_ids", "attention_mask"}
