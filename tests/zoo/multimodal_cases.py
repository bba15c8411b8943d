"""Tiny models that take images, videos or audio: their types by task, their configurations, and inputs for them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from zoo.quirks import QUIRKS
from zoo.tiny import tiny_config

TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "MASK_GENERATION",
    "VIDEO_CLASSIFICATION",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
)
"""The tasks of transformers' auto classes whose models take or give something else than text, in order of value."""

TOKENS = {"image": 250, "video": 251, "audio": 252, "vision_start": 248, "vision_end": 249}
"""The placeholder tokens; text has smaller ones."""

SPEECH = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CONVOLUTIONS = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}

FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "sew", "sew-d", "speecht5"),
        SPEECH,
    ),
    **dict.fromkeys(("wav2vec2-conformer", "wav2vec2-bert"), SPEECH),
    "gemma3": {"mm_tokens_per_image": 4},
    "paligemma": {"projection_dim": 64, "vision_config.projection_dim": 64},
    "blip-2": {"num_query_tokens": 6, "text_config.word_embed_proj_dim": 64},
    "instructblip": {"num_query_tokens": 6, "text_config.word_embed_proj_dim": 64},
    "kosmos-2": {"latent_query_num": 6},
    "internvl": {"vision_config.image_size": [32, 32], "vision_config.patch_size": [8, 8], "image_seq_length": 4},
    "mllama": {
        "vision_config.intermediate_layers_indices": [0, 1],
        "vision_config.num_global_layers": 2,
        "vision_config.vision_output_dim": 192,
        "vision_config.max_num_tiles": 4,
        "text_config.cross_attention_layers": [1],
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sam": {
        "vision_config.output_channels": 32,
        "prompt_encoder_config.hidden_size": 32,
        "prompt_encoder_config.image_embedding_size": 4,
        "mask_decoder_config.hidden_size": 32,
        "mask_decoder_config.mlp_dim": 64,
        "mask_decoder_config.num_hidden_layers": 1,
        "vision_config.global_attn_indexes": [1],
        "vision_config.window_size": 2,
    },
    "qwen2_vl": {"text_config.rope_parameters": MROPE, "vision_config.embed_dim": 64},
    "qwen2_5_vl": {
        "text_config.rope_parameters": MROPE,
        "vision_config.window_size": 32,
        "vision_config.out_hidden_size": 64,
        "vision_config.fullatt_block_indexes": [1],
    },
    **{name: {"text_config.rope_parameters": MROPE} for name in ("glm4v", "glm46v", "glm_ocr")},
    "llava_next": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "florence2": {
        "vision_config.embed_dim": [16, 32],
        "vision_config.depths": [1, 1],
        "vision_config.num_heads": [2, 4],
        "vision_config.num_groups": [2, 4],
        "vision_config.patch_size": [7, 3],
        "vision_config.patch_stride": [4, 2],
        "vision_config.patch_padding": [3, 1],
        "vision_config.patch_prenorm": [False, True],
        "vision_config.window_size": 4,
        "vision_config.projection_dim": 64,
        "vision_config.qkv_bias": True,
    },
}
"""Fields that have to agree with others, beside those that :mod:`zoo.tiny` shrinks."""


def types_of(task: str) -> dict[str, str]:
    """Model types of a task, and the class of each."""
    from transformers.models.auto import modeling_auto as auto

    names = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}


def all_names() -> list[str]:
    """``type:class`` of every model, in the order of the tasks, each class once."""
    found: dict[str, str] = {}
    for task in TASKS:
        for kind, name in types_of(task).items():
            found.setdefault(name, f"{kind}:{name}")
    return list(found.values())


def task_of(name: str) -> str:
    """The first task that a class is for."""
    kind, _, cls = name.partition(":")
    return next((task for task in TASKS if types_of(task).get(kind) == cls), "")


def config_of(kind: str) -> Any:
    """The tiny configuration of a type, with placeholder tokens inside of its vocabulary."""
    config = tiny_config(kind, **QUIRKS.get(kind, {}), **FIELDS.get(kind, {}))
    for each in nested(config):
        for name in list(vars(each)):
            what, _, end = name.rpartition("_token_")
            if end in ("id", "index") and what in TOKENS:
                setattr(each, name, TOKENS[what])
    return config


def nested(config: Any) -> list[Any]:
    """The configuration and all in it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return [config, *(x for each in inner for x in nested(each))]


def build(name: str) -> Any:
    """The model, with weights from a fixed seed."""
    import transformers

    kind, _, cls = name.partition(":")
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config_of(kind)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                if parameter.ndim <= 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
                elif not bool(parameter.any()) or not bool(parameter.isfinite().all()):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


# -- inputs --------------------------------------------------------------------------------------------------------

ROWS, TEXT = 1, 9
"""Other sizes than those of dummy inputs."""


def inputs_of(model: Any) -> tuple[dict[str, Any], str]:
    """Random inputs of the model's modality, and where their shapes come from: "own", or the engine's dummy inputs."""
    try:
        inputs = own_inputs(model)
        with torch.no_grad():
            model(**inputs)
        return inputs, "own"
    except Exception:  # a form of inputs that is not written down here
        return randomized(model), "engine"


def own_inputs(model: Any) -> dict[str, Any]:
    """Inputs in the most common forms, written without the engine's help."""
    arguments = inspect.signature(type(model).forward).parameters
    draw = torch.Generator().manual_seed(7)
    inputs: dict[str, Any] = {}
    if "pixel_values" in arguments:
        inputs["pixel_values"] = torch.randn(ROWS, 3, *image_size(model), generator=draw)
    if "pixel_values_videos" in arguments and "pixel_values" not in arguments:
        inputs["pixel_values_videos"] = torch.randn(ROWS, 4, 3, *image_size(model), generator=draw)
    if "input_values" in arguments:
        inputs["input_values"] = torch.randn(ROWS, 1000, generator=draw)
    if "input_features" in arguments:
        bins, time = field(model, "num_mel_bins", 80), 2 * field(model, "max_source_positions", 40)
        inputs["input_features"] = torch.randn(ROWS, bins, time, generator=draw)
        if "feature_attention_mask" in arguments:
            inputs["feature_attention_mask"] = torch.ones(ROWS, time, dtype=torch.int64)
    if "input_ids" in arguments:
        ids = torch.randint(3, 200, (ROWS, TEXT), generator=draw)
        for what in ("image", "audio"):
            count = features(model, what, inputs)
            if count:
                ids = torch.cat((ids[:, :2], torch.full((ROWS, count), TOKENS[what]), ids[:, 2:]), 1)
        inputs["input_ids"] = ids
        inputs["attention_mask"] = torch.ones_like(ids)
        if "token_type_ids" in arguments and "pixel_values" in inputs:  # as processors pass them
            inputs["token_type_ids"] = (ids == TOKENS["image"]).long()
    if "decoder_input_ids" in arguments:
        inputs["decoder_input_ids"] = torch.randint(3, 200, (ROWS, 5), generator=draw)
    return inputs


def features(model: Any, what: str, inputs: dict[str, Any]) -> int:
    """Features of an image or of audio, counted by computing them."""
    if what == "audio" and "feature_attention_mask" in inputs:
        return ((inputs["feature_attention_mask"].shape[-1] - 1) // 2 + 1) // 2  # two convolutions, then pooling
    method = next((getattr(m, f"get_{what}_features", None) for m in model.modules()), None)
    value = inputs.get("pixel_values" if what == "image" else "input_features")
    names = [n for each in nested(model.config) for n in vars(each) if n.startswith(f"{what}_token_")]
    if method is None or value is None or not names:
        return 0
    with torch.no_grad():
        found = method(value)
    found = getattr(found, "pooler_output", found)
    found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return found.numel() // found.shape[-1] // ROWS


def image_size(model: Any) -> tuple[int, int]:
    """Height and width that the model is configured for."""
    size = field(model, "image_size", 64)
    return (size[-2], size[-1]) if isinstance(size, (list, tuple)) else (size, size)


def field(model: Any, name: str, default: Any) -> Any:
    """A field of the configuration or of one inside of it."""
    for config in reversed(nested(model.config)):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return default


def randomized(model: Any) -> dict[str, Any]:
    """The engine's dummy inputs with other values."""
    from paraxis.capture.dummy_inputs import example_call

    _, inputs = example_call(model, None, torch.device("cpu"))
    draw = torch.Generator().manual_seed(7)
    for name, value in inputs.items():
        if name.endswith("input_ids"):
            text = torch.randint(3, 200, value.shape, generator=draw)
            inputs[name] = torch.where(value >= min(TOKENS.values()), value, text)
        elif value.is_floating_point() and name not in ("input_points", "input_boxes"):
            inputs[name] = torch.randn(value.shape, generator=draw)
    return inputs
