"""The forms in which models take images, videos and audio."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paraxis.capture.dummy import forms
from paraxis.capture.dummy.facts import Facts


class Grid(nn.Module):
    """Takes patches of images of any size, and their number."""

    config = SimpleNamespace(patch_size=4, temporal_patch_size=2, spatial_merge_size=2, num_channels=3)
    input_modalities = ("image", "text")

    def forward(self, input_ids: Any = None, pixel_values: Any = None, image_grid_thw: Any = None) -> None: ...


class Video(nn.Module):
    """Takes frames under the name of images."""

    config = SimpleNamespace(image_size=16, num_frames=3)
    input_modalities = "video"

    def forward(self, pixel_values: Any) -> None: ...


class Named(nn.Module):
    """Has names of its own."""

    config = SimpleNamespace(num_mel_bins=10)
    input_modalities = ("audio", "text")

    def forward(self, audio_input_features: Any = None, audio_attention_mask: Any = None) -> None: ...


def facts_of(model: nn.Module) -> Facts:
    return Facts(model, 2, 8, torch.device("cpu"))


def test_patches_agree_with_their_grid() -> None:
    facts = facts_of(Grid())
    first = forms.forms_of(facts, "image")[0]
    made = forms.arguments_of(facts, first)
    grid = made["image_grid_thw"]
    assert made["pixel_values"].shape == (int(grid.prod(-1).sum()), 3 * 2 * 4 * 4)
    assert grid.shape == (2, 3) and not grid[:, 1:].remainder(2).any()  # divisible by the merge size
    assert not forms.forms_of(facts, "audio") and not forms.forms_of(facts, "video")


def test_a_model_of_videos_gets_frames_as_pixel_values() -> None:
    facts = facts_of(Video())
    assert not forms.forms_of(facts, "image")
    (form,) = forms.forms_of(facts, "video")
    assert forms.arguments_of(facts, form)["pixel_values"].shape == (2, 3, 3, 16, 16)


def test_arguments_have_the_names_of_the_model() -> None:
    facts = facts_of(Named())
    made = forms.arguments_of(facts, forms.forms_of(facts, "audio")[0])
    assert made.keys() == {"audio_input_features", "audio_attention_mask"}
    assert made["audio_input_features"].shape[1] == 10


@pytest.mark.parametrize("modality", forms.FORMS)
def test_every_form_gives_its_marks(modality: str) -> None:
    model = Grid()
    model.config = SimpleNamespace(image_size=16, patch_size=4, num_mel_bins=8)  # type: ignore[misc]
    for form in forms.FORMS[modality]:
        made = form.make(facts_of(model))
        assert all(isinstance(value, torch.Tensor) for value in made.values())
        if form.make is not forms.images_per_row:  # its mark is an argument beside it, too
            assert set(form.marks) <= made.keys()


class Row(nn.Module):
    """Takes the patches of images and videos in a row."""

    config = SimpleNamespace(patch_size=4, spatial_merge_size=1, num_channels=3)
    input_modalities = ("image", "video", "text")

    def forward(
        self,
        input_ids: Any = None,
        pixel_values: Any = None,
        target_sizes: Any = None,
        pixel_values_videos: Any = None,
        target_sizes_videos: Any = None,
    ) -> None: ...


@pytest.mark.parametrize(("modality", "suffix"), [("image", ""), ("video", "_videos")])
def test_patches_in_a_row_agree_with_their_sizes(modality: str, suffix: str) -> None:
    form = forms.forms_of(facts_of(Row()), modality)[0]
    made = forms.arguments_of(facts_of(Row()), form)
    pixels, sizes = made[f"pixel_values{suffix}"], made[f"target_sizes{suffix}"]
    assert pixels.shape == (1, 3, 4, 4 * int(sizes.prod(1).sum())) and len(sizes) == 2
