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


def with_grids(name: str) -> Any:
    """A model that takes images of any size as patches with a grid: ``qwen2_vl`` and those that follow it."""
    import transformers

    text = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=128,
        max_position_embeddings=128,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    )
    patches = dict(patch_size=8, temporal_patch_size=2, spatial_merge_size=2, num_heads=4, depth=2)
    vision: dict[str, Any] = {
        "qwen2_vl": dict(embed_dim=32, hidden_size=32, mlp_ratio=2),
        "qwen2_5_vl": dict(hidden_size=32, out_hidden_size=32, window_size=32, fullatt_block_indexes=[1])
        | dict(intermediate_size=64),
        "qwen3_vl": dict(hidden_size=32, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0])
        | dict(intermediate_size=64),
    }[name]
    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[name]
    tokens = dict(image_token_id=IMAGE_TOKEN, video_token_id=98, vision_start_token_id=96, vision_end_token_id=97)
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config={**patches, **vision}, **tokens)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()


def on_meta(build: Any, **fields: Any) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        return build(**fields)
