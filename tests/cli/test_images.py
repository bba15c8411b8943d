"""``paraxis generate --image``: the processor's inputs, and errors before ranks start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from cli.helpers import call
from helpers.image_chat import picture, save

from paraxis.cli._images import inputs_of, load_processor

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llava")
    save(place)
    return place


def unsharded(folder: Path, images: list[Path], prompt: str) -> list[str]:
    """The words that the unsharded model generates."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    inputs = processor(images=[Image.open(path).convert("RGB") for path in images], text=prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).split()


def test_the_text_is_that_of_the_unsharded_model(folder: Path, tmp_path: Path) -> None:
    images = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, path in enumerate(images):
        picture(path, seed=seed)
    flags = [part for path in images for part in ("--image", str(path))]
    found = call("generate", str(folder), *flags, "--prompt", "w3 w7", "--max-new-tokens", "4", "--no-stream")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.split() == unsharded(folder, images, "<image>\n<image>\nw3 w7")


@pytest.mark.parametrize(
    ("prompt", "chat", "same"),
    [
        ("w3 w7", False, "<image> w3 w7"),
        ("w3 <image> w7", False, "w3 <image> w7"),
        ("w3 w7", True, "<image> w3 w7 w5"),
    ],
)
def test_where_the_tokens_of_an_image_are(folder: Path, tmp_path: Path, prompt: str, chat: bool, same: str) -> None:
    image = picture(tmp_path / "a.png")
    processor = load_processor(str(folder), {})
    found = inputs_of(processor, prompt, [str(tmp_path / "a.png")], chat)
    expected = processor(images=[image], text=same, return_tensors="pt")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def error_of(folder: Path, path: Path) -> str:
    found = call("generate", str(folder), "--image", str(path), "--prompt", "w3")
    assert found.exit_code in (1, 2) and len(found.stderr.strip().splitlines()) == 1
    return found.stderr


def test_what_is_no_image_is_an_error(folder: Path, tmp_path: Path) -> None:
    assert "there is no such file" in error_of(folder, tmp_path / "none.png")
    (tmp_path / "text.png").write_text("text")
    assert "cannot read it as an image" in error_of(folder, tmp_path / "text.png")


def test_a_model_without_an_image_processor_is_an_error(folder: Path, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "put its preprocessor_config.json" in error_of(tmp_path, tmp_path / "a.png")


def test_without_pillow_the_error_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in error_of(folder, tmp_path / "a.png")


def test_inputs_go_to_the_model_in_its_dtype() -> None:
    from paraxis.cli.generate import to_model

    assert to_model(torch.ones(1), "cpu", torch.bfloat16).dtype == torch.bfloat16
    assert to_model(torch.ones(1, dtype=torch.int64), "cpu", torch.bfloat16).dtype == torch.int64
    assert to_model([1], "cpu", torch.bfloat16) == [1]
