"""What is known of a model's inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from capture.dummy.tiny_multimodal import llava, on_meta, whisper

from paraxis.capture.dummy.facts import Facts


def facts_of(model: Any) -> Facts:
    return Facts(model, 2, 8, torch.device("cpu"))


def test_fields_are_found_where_they_are_about() -> None:
    """Text and vision have a hidden size each; the size of an image is in a sub-configuration."""
    model = on_meta(llava)
    model.config.text_config.hidden_size, model.config.vision_config.hidden_size = 1, 2
    facts = facts_of(model)
    assert facts.vision("hidden_size") == 2 and facts.text("hidden_size") == 1
    assert facts.image_size == (32, 32) and facts.patch == 8 and facts.channels == 3
    assert facts.vision("no_such_field", default=5) == 5


def test_signature_and_modalities() -> None:
    facts = facts_of(on_meta(whisper))
    assert facts.modalities == ("audio", "text") and "input_features" in facts.arguments
    assert "kwargs" not in facts.arguments and facts.required == []


def test_processor_files_say_what_the_configuration_does_not(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 48, "width": 48}}))
    model = on_meta(llava)
    model.config.vision_config.image_size = None
    model.config.name_or_path = str(tmp_path)
    assert facts_of(model).image_size == (48, 48)
    (tmp_path / "preprocessor_config.json").write_text("not json")
    assert facts_of(model).image_size == (224, 224)
