"""A checkpoint of a tiny model of images and text with its processor, as on the Hub, and pictures for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from capture.dummy.tiny_multimodal import IMAGE_TOKEN, llava

TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)


def save(folder: Path) -> Any:
    """Save model, tokenizer (one word per token) and processor; the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = llava()
    model.save_pretrained(folder)
    names = {f"w{i}": i for i in range(128) if i != IMAGE_TOKEN}
    words = Tokenizer(models.WordLevel({**names, "<image>": IMAGE_TOKEN}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0", additional_special_tokens=["<image>"]
    )
    size = {"height": 32, "width": 32}
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return model


def picture(path: Path, size: tuple[int, int] = (48, 40), seed: int = 0) -> Any:
    """A PNG of random pixels; the image."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (*reversed(size), 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(path)
    return image
