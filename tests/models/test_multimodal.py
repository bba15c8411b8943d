"""Models with an image or audio tower, by the plain call: planned completely, and right with and without images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capture.dummy.tiny_multimodal import IMAGE_TOKEN, llava, whisper, with_grids
from helpers.image_chat import picture, save
from models.compare import gradient_errors, max_difference, parallel

NEW = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def image_inputs() -> list[dict[str, Any]]:
    """A call with an image, and one with text alone; sizes are not those of dummy inputs."""
    draw = torch.Generator().manual_seed(3)
    text = torch.randint(3, 90, (1, 9), generator=draw)
    ids = torch.cat((text[:, :3], torch.full((1, 16), IMAGE_TOKEN), text[:, 3:]), 1)
    return [{"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32, generator=draw)}, {"input_ids": text}]


def audio_inputs() -> list[dict[str, Any]]:
    """A spectrogram and the decoder's tokens."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (1, 5), generator=draw)
    return [{"input_features": torch.randn(1, 16, 48, generator=draw), "decoder_input_ids": ids}]


CASES = {"llava": (llava, image_inputs), "whisper": (whisper, audio_inputs)}
UNUSED = ("model.vision_tower.encoder.layers.1.", "model.vision_tower.post_layernorm.")
"""LLaVA takes the features before the last layer: nobody reads its results."""


def compared(folder: str, name: str) -> dict[str, Any]:
    built = CASES[name][0]()
    unsharded = type(built).from_pretrained(folder, dtype=torch.float32).eval()
    for each, parameter in built.named_parameters():  # loading loses requires_grad
        unsharded.get_parameter(each).requires_grad_(parameter.requires_grad)
    model, ctx = parallel(folder)
    model.eval()
    found: dict[str, Any] = {"unplanned": list(ctx.plan.unplanned), "fraction": ctx.plan.sharded_fraction}
    calls = CASES[name][1]()
    found["outputs"] = [max_difference(model(**call).logits, unsharded(**call).logits) for call in calls]
    for each in (model, unsharded):
        each(**calls[0]).logits.square().mean().backward()
    found["gradients"] = max(gradient_errors(model, unsharded).values())
    inputs = {key: value for key, value in calls[0].items() if key != "decoder_input_ids"}
    found["tokens"] = torch.equal(model.generate(**inputs, **NEW), unsharded.generate(**inputs, **NEW))
    return found


@pytest.mark.parametrize("name", CASES)
def test_towers_are_planned_by_the_plain_call(name: str, ranks: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    CASES[name][0]().save_pretrained(tmp_path)
    for found in ranks(2).run(compared, str(tmp_path), name):
        assert all(each.startswith(UNUSED) for each in found["unplanned"]) and found["fraction"] < 0.55
        assert max(found["outputs"]) < 1e-4 and found["gradients"] < 1e-3 and found["tokens"]


# -- images of any size --------------------------------------------------------------------------------------------

GRIDS = [(2, 4), (4, 4), (6, 2), (8, 10), (2, 2), (4, 8), (12, 6), (10, 10), (6, 8), (14, 4)]
"""Height and width of ten images in patches, four of which become one token."""


def grid_inputs(*grids: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A call with images of these sizes."""
    draw = torch.Generator().manual_seed(5)
    pixels = torch.randn(sum(h * w for h, w in grids), 3 * 2 * 8 * 8, generator=draw)
    rows = [5, 6]
    for h, w in grids:
        rows += [96, *[IMAGE_TOKEN] * (h * w // 4), 97]
    ids = torch.tensor([[*rows, 7, 8, 9]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
    }


def sizes_compared(folder: str, name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    unsharded = type(with_grids(name)).from_pretrained(folder, dtype=torch.float32).eval()
    model, ctx = parallel(folder)
    model.eval()
    found: dict[str, Any] = {"unplanned": ctx.plan.unplanned, "errors": [], "compiled": []}
    with torch.no_grad():
        for grid in GRIDS:
            inputs = grid_inputs(grid)
            found["errors"].append(max_difference(model(**inputs).logits, unsharded(**inputs).logits))
            found["compiled"].append(ctx.compile_times)
    inputs = grid_inputs((4, 6), (2, 4))
    for each in (model, unsharded):
        each(**inputs).logits.square().mean().backward()
    found["gradients"] = max(gradient_errors(model, unsharded).values())
    found["tokens"] = torch.equal(model.generate(**inputs, **NEW), unsharded.generate(**inputs, **NEW))
    found["breaks"] = ctx.plan.breaks
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen2_vl", marks=pytest.mark.long), "qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)],
)
def test_a_new_image_size_compiles_nothing(name: str, ranks: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with_grids(name).save_pretrained(tmp_path)
    for found in ranks(2).run(sizes_compared, str(tmp_path), name, timeout=600):
        assert not found["unplanned"] and not found["breaks"]
        assert max(found["errors"]) < 1e-4 and found["gradients"] < 1e-3 and found["tokens"]
        assert found["compiled"][-1] - found["compiled"][0] <= 3


def piped(folder: str) -> dict[str, Any]:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor, pipeline

    processor, picture = AutoProcessor.from_pretrained(folder), Image.open(f"{folder}/a.png").convert("RGB")
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "w3"}]}]
    found: dict[str, Any] = {}
    for name, model in (
        ("parallel", parallel(folder)[0].eval()),
        ("unsharded", AutoModelForImageTextToText.from_pretrained(folder).eval()),
    ):
        images = [picture, picture.resize((40, 24))]
        two = processor(images=images, text="<image> <image> w5", return_tensors="pt")
        pipe = pipeline("image-text-to-text", model=model, processor=processor)
        asked = {"images": picture, "text": "<image> w3 w7"}, {"text": chat}
        answers = [pipe(**each, return_full_text=False, generate_kwargs=dict(NEW)) for each in asked]
        found[name] = (model.generate(**two, **NEW).tolist(), [answer[0]["generated_text"] for answer in answers])
    return found


def test_processors_and_pipelines_work_unchanged(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    save(tmp_path)
    picture(tmp_path / "a.png")
    for found in ranks(2).run(piped, str(tmp_path)):
        assert found["parallel"] == found["unsharded"] and all(found["unsharded"][1])
