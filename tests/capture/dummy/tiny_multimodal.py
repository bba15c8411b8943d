"""Tiny models with an image or audio tower, on the meta device or with weights."""

from __future__ import annotations

from typing import Any

import torch

IMAGE_TOKEN = 99


def llava(**fields: Any) -> Any:
    """A LLaVA model: 16 features of an image of 32 x 32 pixels."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    text = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=128, max_position_embeddings=64, pad_token_id=0)
    vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, **fields)
    return LlavaForConditionalGeneration(config).eval()


def whisper() -> Any:
    """A Whisper model: a spectrogram of 16 frequencies fills 24 positions."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=128,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=24,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config).eval()


def on_meta(build: Any, **fields: Any) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        return build(**fields)
