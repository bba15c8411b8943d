"""Pictures of the report for models of different kinds, taken by headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .page import ROOT

IMAGES = ROOT / "docs" / "images"
WIDE, NARROW = (1240, 1360), (390, 844)
MAX_BYTES = 200_000
"""Of a picture: they are part of every clone."""


def dense() -> tuple[Any, dict[str, Any]]:
    """A dense decoder."""
    from transformers import LlamaConfig

    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    return LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **sizes), {"context": 8192}


def moe() -> tuple[Any, dict[str, Any]]:
    """A mixture of experts."""
    from transformers import MixtralConfig

    return MixtralConfig(architectures=["MixtralForCausalLM"], dtype="bfloat16"), {}


def hybrid() -> tuple[Any, dict[str, Any]]:
    """State-space and attention layers."""
    from transformers import BambaConfig

    sizes = {"num_hidden_layers": 8, "attn_layer_indices": [3, 7]}
    return BambaConfig(architectures=["BambaForCausalLM"], dtype="bfloat16", **sizes), {}


def encoder_decoder() -> tuple[Any, dict[str, Any]]:
    """An encoder and a decoder."""
    from transformers import T5Config

    sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    return T5Config(architectures=["T5ForConditionalGeneration"], dtype="bfloat16", **sizes), {}


def vision_language() -> tuple[Any, dict[str, Any]]:
    """Vision and language, planned with an image."""
    import torch
    from transformers import LlavaConfig

    config = LlavaConfig(architectures=["LlavaForConditionalGeneration"], dtype="bfloat16", image_seq_length=576)
    ids = torch.ones(1, 592, dtype=torch.int64)
    ids[:, 8:584] = config.image_token_id
    size = config.vision_config.image_size
    return config, {
        "example_inputs": {"input_ids": ids, "pixel_values": torch.zeros(1, 3, size, size, dtype=torch.bfloat16)}
    }


def plain_module() -> tuple[Any, dict[str, Any]]:
    """A module that is not from transformers."""
    import torch
    from torch import nn

    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 6)
    return module.eval(), {"example_inputs": torch.randn(2, 128, 512)}


MODELS: dict[str, tuple[str, Callable[[], tuple[Any, dict[str, Any]]]]] = {
    "dense": ("A dense model (Llama, 8B)", dense),
    "moe": ("A mixture of experts (Mixtral)", moe),
    "hybrid": ("State-space and attention layers (Bamba)", hybrid),
    "encoder-decoder": ("Encoder and decoder (T5)", encoder_decoder),
    "vision-language": ("Vision and language (Llava)", vision_language),
    "module": ("A plain module (nn.TransformerEncoder)", plain_module),
}


def write_reports(folder: Path, names: list[str] | None = None, ranks: int = 4) -> list[Path]:
    """One file per model with its report."""
    from paraxis import report_plan

    found = []
    for name, (title, make) in MODELS.items():
        if not names or name in names:
            model, options = make()
            report_plan(model, ranks, folder / f"{name}.html", title=title, **options)
            found.append(folder / f"{name}.html")
    return found


def shoot(page: Path, picture: Path, size: tuple[int, int], dark: bool = False, anchor: str = "") -> None:
    """A picture of a page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise RuntimeError("screenshots need chromium or google-chrome on the PATH")
    themed = page.with_suffix(".themed.html")
    theme = "dark" if dark else "light"
    themed.write_text(page.read_text().replace("<html ", f'<html data-theme="{theme}" ', 1))
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}"]
        subprocess.run([*command, f"{themed.as_uri()}{anchor}"], check=True, capture_output=True, timeout=120)
    themed.unlink()
    if picture.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{picture} has {picture.stat().st_size} bytes")


def renew(names: list[str]) -> None:
    """Take the pictures in docs/images again."""
    with tempfile.TemporaryDirectory() as folder:
        for page in write_reports(Path(folder), names):
            shoot(page, IMAGES / f"report-{page.stem}.png", WIDE)
            if page.stem == "dense":
                shoot(page, IMAGES / "report-dark.png", WIDE, dark=True)
                shoot(page, IMAGES / "report-narrow.png", NARROW)
