"""Images of ``paraxis generate --image``: checked before ranks start, and made into inputs by the model's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._errors import UsageError


def check_images(paths: list[str], model: str, options: dict[str, Any]) -> None:
    """Raise if Pillow is missing, a file is no image, or the model has no processor for images."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError("--image needs Pillow: pip install pillow") from None
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"--image {path}: there is no such file")
        try:
            with Image.open(path) as image:
                image.verify()
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise UsageError(f"--image {path}: Pillow cannot read it as an image") from error
    load_processor(model, options)


def load_processor(model: str, options: dict[str, Any]) -> Any:
    """The model's processor, which takes images.

    Raises:
        ValueError: it cannot be loaded, or takes no images; the message says what to do.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model, **options)
    except (ValueError, ImportError, TypeError, KeyError, OSError) as error:
        raise ValueError(
            f"transformers cannot load a processor for {model!r}: put its preprocessor_config.json (and "
            "processor_config.json, if it has one) next to the weights, or call the model from Python with pixel "
            f"values. transformers says: {' '.join(str(error).split())}"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"the processor of {model!r} is a {type(processor).__name__}, which takes no images: omit --image"
        )
    return processor


def inputs_of(processor: Any, prompt: str, paths: list[str], chat: bool) -> dict[str, Any]:
    """The inputs of ``generate``: what the processor makes of a prompt and images.

    Without ``chat``, the tokens that stand for the images come before the prompt unless it says where they are.
    """
    from PIL import Image

    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
    if chat:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": prompt}]
        return dict(
            processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )
    token = getattr(processor, "image_token", None)
    if isinstance(token, str) and token not in prompt:
        prompt = "".join(f"{token}\n" for _ in images) + prompt
    return dict(processor(images=images, text=prompt, return_tensors="pt"))
