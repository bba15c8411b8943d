"""Models of other kinds: encoders, encoder-decoders, vision, speech, vision and text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.cases import Case
from zoo.tiny import tiny_config

IMAGE = {"image_size": 32, "patch_size": 8}
PYRAMID = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "image_size": 32, "patch_size": 4}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32}
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

ENCODERS = {
    "bert": "BertModel",
    "bert-mlm": "BertForMaskedLM",
    "bert-sequence": "BertForSequenceClassification",
    "bert-token": "BertForTokenClassification",
    "bert-qa": "BertForQuestionAnswering",
    "roberta-mlm": "RobertaForMaskedLM",
    "roberta-sequence": "RobertaForSequenceClassification",
    "distilbert-mlm": "DistilBertForMaskedLM",
    "distilbert-sequence": "DistilBertForSequenceClassification",
    "albert-mlm": "AlbertForMaskedLM",
    "electra-token": "ElectraForTokenClassification",
    "mpnet-mlm": "MPNetForMaskedLM",
    "deberta-mlm": "DebertaForMaskedLM",
    "deberta-v2-sequence": "DebertaV2ForSequenceClassification",
    "xlm-roberta-token": "XLMRobertaForTokenClassification",
    "modernbert-mlm": "ModernBertForMaskedLM",
    "convbert-mlm": "ConvBertForMaskedLM",
    "squeezebert-mlm": "SqueezeBertForMaskedLM",
    "mobilebert-mlm": "MobileBertForMaskedLM",
    "fnet-mlm": "FNetForMaskedLM",
    "esm-mlm": "EsmForMaskedLM",
    "ernie-mlm": "ErnieForMaskedLM",
    "rembert-mlm": "RemBertForMaskedLM",
    "nystromformer-mlm": "NystromformerForMaskedLM",
    "camembert-mlm": "CamembertForMaskedLM",
    "llama-sequence": "LlamaForSequenceClassification",
    "gpt2-sequence": "GPT2ForSequenceClassification",
    "mistral-token": "MistralForTokenClassification",
    "opt-sequence": "OPTForSequenceClassification",
    "t5-encoder": "T5EncoderModel",
}
SEQ2SEQ = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "mvp": "MvpForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
    "prophetnet": "ProphetNetForConditionalGeneration",
    "bart-sequence": "BartForSequenceClassification",
}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTModel", IMAGE),
    "vit-image": ("ViTForImageClassification", IMAGE),
    "deit-image": ("DeiTForImageClassification", IMAGE),
    "beit-image": ("BeitForImageClassification", IMAGE),
    "dinov2": ("Dinov2Model", IMAGE),
    "dinov3_vit": ("DINOv3ViTModel", IMAGE),
    "ijepa": ("IJepaModel", IMAGE),
    "data2vec-vision": ("Data2VecVisionModel", IMAGE),
    "clip-vision": ("CLIPVisionModel", IMAGE),
    "siglip-vision": ("SiglipVisionModel", IMAGE),
    "swin-image": ("SwinForImageClassification", PYRAMID),
    "swinv2": ("Swinv2Model", PYRAMID),
    "convnext-image": ("ConvNextForImageClassification", STAGES),
    "convnextv2": ("ConvNextV2Model", STAGES),
    "yolos": ("YolosModel", {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4}),
    "vit_msn": ("ViTMSNModel", IMAGE),
}
SPEECH_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2Model", SPEECH),
    "wav2vec2-ctc": ("Wav2Vec2ForCTC", SPEECH),
    "hubert": ("HubertModel", SPEECH),
    "wavlm": ("WavLMModel", SPEECH),
    "unispeech-sat": ("UniSpeechSatModel", SPEECH),
}


def tokens(model: Any) -> dict[str, torch.Tensor]:
    """Token ids."""
    size = model.config.get_text_config().vocab_size
    return {"input_ids": torch.randint(3, size, (2, 10), generator=torch.Generator().manual_seed(7))}


def with_labels(model: Any) -> dict[str, torch.Tensor]:
    """Token ids, and labels of the kind that the model's head takes."""
    inputs = tokens(model)
    if "labels" in inspect.signature(model.forward).parameters:
        name = type(model).__name__
        if "Sequence" in name:
            inputs["labels"] = torch.tensor([0, 1])
        elif "TokenClass" in name:
            inputs["labels"] = inputs["input_ids"] % 2
        else:
            inputs["labels"] = inputs["input_ids"].clone()
    return inputs


def both_sides(model: Any) -> dict[str, torch.Tensor]:
    """The inputs of an encoder and of its decoder."""
    inputs = with_labels(model)
    if "Sequence" in type(model).__name__:
        inputs["input_ids"][:, -1] = model.config.eos_token_id
        return inputs
    return {**inputs, "decoder_input_ids": inputs["input_ids"].flip(1)}


def pixels(model: Any) -> dict[str, torch.Tensor]:
    """Images."""
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(7))}


def sound(model: Any) -> dict[str, torch.Tensor]:
    """Raw audio."""
    return {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(7))}


def spectrum(model: Any) -> dict[str, torch.Tensor]:
    """A log-mel spectrogram, and the decoder's token ids."""
    config = model.config
    features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "decoder_input_ids": torch.arange(3, 11)[None].repeat(2, 1)}


def text_and_pixels(model: Any) -> dict[str, torch.Tensor]:
    """Token ids and images."""
    return {**tokens(model), **pixels(model)}


FIELDS: dict[str, dict[str, Any]] = {
    "esm-mlm": {"vocab_size": 64, "mask_token_id": 32, "pad_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0},
    "marian": {"decoder_start_token_id": 0},
    "whisper": {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    "llama-sequence": {"pad_token_id": 0},
    "gpt2-sequence": {"pad_token_id": 0},
}
"""What single models need in addition to the general shrinking."""


def _case(name: str, class_name: str, inputs: Callable[[Any], dict[str, Any]], fields: dict[str, Any]) -> Case:
    def build(**overrides: Any) -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        merged = {**fields, **FIELDS.get(name, {}), **overrides}
        return model_class(tiny_config(model_class.config_class.model_type, **merged))

    generates = "ConditionalGeneration" in class_name or class_name == "MarianMTModel"
    return Case(f"{name}*", "other", build, inputs, generates=generates)


def other_cases() -> list[Case]:
    """All of them. Names end in a star, since many are also types of causal language models."""
    cases = [_case(name, model, with_labels, {}) for name, model in ENCODERS.items()]
    cases += [_case(name, model, both_sides, {}) for name, model in SEQ2SEQ.items()]
    cases += [_case(name, model, pixels, fields) for name, (model, fields) in VISION.items()]
    cases += [_case(name, model, sound, fields) for name, (model, fields) in SPEECH_MODELS.items()]
    cases.append(_case("whisper", "WhisperForConditionalGeneration", spectrum, {}))
    cases.append(_case("clip", "CLIPModel", text_and_pixels, {}))
    cases.append(_case("siglip", "SiglipModel", text_and_pixels, {}))
    return cases
