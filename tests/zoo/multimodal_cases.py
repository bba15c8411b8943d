"""Tiny models that take images, videos or audio: their types by task, their configurations, and inputs for them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from zoo.multimodal_fields import FIELDS
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
    "FEATURE_EXTRACTION",
)
"""The tasks of transformers' auto classes whose models take or give something else than text, in order of value."""

MODAL = {"pixel_values", "pixel_values_videos", "input_features", "input_values", "flattened_patches", "image_patches"}
"""The arguments that are images, videos or audio."""
PARTS = ("_vision", "_audio", "_encoder", "_decoder", "_vision_model", "_video")
STANDALONE = ("dinov3_vit", "dinov3_convnext", "vit_mae", "sam3_lite_text", "nemotron_asr_streaming")

TOKENS = {"image": 250, "video": 251, "audio": 252, "vision_start": 248, "vision_end": 249}
"""The placeholder tokens; text has smaller ones."""

BASES = "FEATURE_EXTRACTION"
"""Models without a head: those of types that have no task."""

KNOWN: dict[str, str] = {
    "deimv2:Deimv2ForObjectDetection": "rounding decides which queries are taken: in float64, outputs and gradients "
    "agree to 1e-15",
}
"""Why models are wrong that cannot be right."""

_FOUR = """
aria aya_vision blip blip-2 chameleon cohere2_vision deepseek_vl florence2 gemma3 git got_ocr2 idefics idefics2
idefics3 instructblip internvl llama4 llava llava_next llava_onevision mistral3 mllama ovis2 paligemma qwen2_vl
qwen2_5_vl qwen3_vl smolvlm vipllava voxtral qwen2_audio glmasr lfm2_vl udop video_llava vision-encoder-decoder
whisper moonshine speech_to_text wav2vec2 hubert wavlm parakeet_ctc clip siglip align vit beit swin convnext
resnet dinov2 segformer detr rt_detr deformable_detr yolos owlvit grounding-dino mask2former maskformer dpt
depth_anything sam vivit videomae fun_asr_nano granite_speech granite_speech_plus qwen3_asr instructblipvideo
janus qianfan_ocr llava_next_video kimi_k25 lighton_ocr inkling_mm_model muse_glimmer levit pvt poolformer
unispeech-sat wav2vec2-bert audio-spectrogram-transformer musicgen vits speecht5 clap dac encodec zoedepth
upernet
"""
AT_FOUR = set(_FOUR.split())
"""The types that run on 4 ranks too."""


def types_of(task: str) -> dict[str, str]:
    """Model types of a task, and the class of each."""
    from transformers.models.auto import modeling_auto as auto

    if task == BASES:
        return bases()
    names = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}


@functools.cache
def bases() -> dict[str, str]:
    """Models without a head whose type has no task, and is not a part of another type."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    types = {kind for task in TASKS if task != BASES for kind in types_of(task)}
    found = {}
    for kind, name in auto.MODEL_MAPPING_NAMES.items():
        name = name if isinstance(name, str) else name[0]
        part = kind not in STANDALONE and any(kind != other and kind.startswith(f"{other}_") for other in types)
        if kind in types or part or kind.endswith(PARTS):
            continue
        forward = getattr(getattr(transformers, name, None), "forward", None)
        if forward is not None and MODAL & set(inspect.signature(forward).parameters):
            found[kind] = name
    return found


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
    config = tiny_config(kind, {**QUIRKS, **FIELDS})
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
