"""Fields of tiny models that take images, videos or audio: those that have to agree with others, and lists of sizes.

By model type; they also apply where the type is a sub-configuration. :mod:`zoo.tiny` shrinks everything else.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def every(types: tuple[str, ...], fields: Fields) -> dict[str, Fields]:
    """These fields for each of the types."""
    return {kind: fields for kind in types}


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
AXIAL = {"rope_type": "axial", "rope_theta": 10000.0}

# -- audio ---------------------------------------------------------------------------------------------------------

SPEECH: Fields = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "vocab_size": 40,
}
CONFORMER: Fields = {
    "num_attention_heads": 2,
    "layers": 1,
    "linear_units": 64,
    "attention_dropout_rate": 0.0,
    "dropout_rate": 0.0,
    "positional_dropout_rate": 0.0,
    "normalize_before": False,
    "concat_after": False,
}
AUDIO: dict[str, Fields] = {
    **every(("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio", "sew", "sew-d"), SPEECH),
    **every(("wav2vec2-conformer", "wav2vec2-bert"), SPEECH),
    "speecht5": {
        **{key: value for key, value in SPEECH.items() if key != "vocab_size"},
        "speech_decoder_prenet_units": 32,
        "speech_decoder_postnet_units": 32,
        "speech_decoder_postnet_layers": 2,
        "speaker_embedding_dim": 24,
    },
    "whisper": {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    "moonshine_streaming": {"encoder_config.sliding_windows": [[16, 4], [16, 0]], "num_key_value_heads": 8},
    "granite_speech5_encoder": {"context_size": 8, "subsample_layers": [0], "num_mel_bins": 32},
    "granite_speech_encoder": {"context_size": 20},
    **every(
        ("granite_speech", "granite_speech_plus"),
        {"window_size": 15, "projector_config.encoder_hidden_size": 128, "encoder_config.output_dim": 42},
    ),
    "clap": {"projection_dim": 64},
    "clap_audio_model": {
        "projection_dim": 64,
        "spec_size": 64,
        "num_mel_bins": 16,
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [2, 4, 8, 8],
        "patch_embeds_hidden_size": 16,
        "hidden_size": 128,
        "window_size": 2,
    },
    "clap_text_model": {"projection_dim": 64},
    "fastspeech2_conformer": {
        "encoder_config": {**CONFORMER, "kernel_size": 7},
        "decoder_config": {**CONFORMER, "kernel_size": 15},
        "speech_decoder_postnet_units": 32,
        "speech_decoder_postnet_layers": 2,
        "duration_predictor_channels": 32,
        "energy_predictor_channels": 32,
        "pitch_predictor_channels": 32,
        "pitch_predictor_layers": 2,
    },
    "fastspeech2_conformer_hifigan": {"model_in_dim": 16, "upsample_initial_channel": 32},
    "vits": {
        "flow_size": 64,
        "spectrogram_bins": 17,
        "upsample_initial_channel": 32,
        "upsample_rates": [4, 2],
        "upsample_kernel_sizes": [8, 4],
        "duration_predictor_filter_channels": 32,
        "posterior_encoder_num_wavenet_layers": 2,
        "num_attention_heads": 2,
    },
    "dia": {
        "delay_pattern": [0, 1, 2],
        "decoder_config.num_channels": 3,
        "decoder_config.cross_hidden_size": 64,
        "decoder_config.cross_num_attention_heads": 8,
        "decoder_config.cross_num_key_value_heads": 8,
        "decoder_config.cross_head_dim": 8,
    },
    "encodec": {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_dim": 64, "hidden_size": 64},
    "mimi": {
        "num_filters": 8,
        "upsampling_ratios": [4, 2],
        "codebook_dim": 32,
        "vector_quantization_hidden_dimension": 32,
        "upsample_groups": 64,
        "num_quantizers": 4,
    },
    "csm": {"num_codebooks": 4, "depth_decoder_config.num_codebooks": 4, "text_vocab_size": 256},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16, "audio_config.num_mel_bins": 112},
    "kyutai_speech_to_text": {"num_codebooks": 4},
    **every(("nemo_speechlm", "nemotron3_diarization"), {"head_config.audio_hidden_size": 64}),
    "gradium_phonon_tts": {"flow_head_config.condition_dim": 64},
    "pocket_tts": {"flow_head_config.condition_dim": 64},
}

# -- images --------------------------------------------------------------------------------------------------------

RESNET: Fields = {"embedding_size": 16, "hidden_sizes": [32, 64, 64, 128], "depths": [1, 1, 1, 1]}
PYRAMID: Fields = {"hidden_sizes": [16, 32, 64, 64], "num_attention_heads": [1, 2, 4, 8], "depths": [1, 1, 1, 1]}
SWIN: Fields = {
    "embed_dim": 24,
    "num_heads": [3, 6, 12, 24],
    "depths": [2, 2, 1, 1],
    "num_layers": 4,
    "window_size": 4,
    "image_size": 128,
}
TWELVE: Fields = {"num_hidden_layers": 4, "image_size": 64}
"""Of a vision transformer whose layers are stages: heads take the results of four of them."""

DPT: Fields = {"neck_hidden_sizes": [16, 32, 64, 64], "fusion_hidden_size": 32}
SAM: Fields = {
    "vision_config.output_channels": 32,
    "prompt_encoder_config.hidden_size": 32,
    "prompt_encoder_config.image_embedding_size": 4,
    "mask_decoder_config.hidden_size": 32,
    "mask_decoder_config.mlp_dim": 64,
    "mask_decoder_config.num_hidden_layers": 1,
    "mask_decoder_config.iou_head_hidden_dim": 32,
    "vision_config.global_attn_indexes": [1],
    "vision_config.window_size": 2,
}
SAM2: Fields = {
    **{f"{part}_config.hidden_size": 32 for part in ("prompt_encoder", "mask_decoder")},
    "prompt_encoder_config.image_size": 128,
    "prompt_encoder_config.patch_size": 16,
    "mask_decoder_config.num_hidden_layers": 1,
    "mask_decoder_config.mlp_dim": 64,
    "mask_decoder_config.iou_head_hidden_dim": 32,
    "mask_decoder_config.num_attention_heads": 4,
}
DETR: Fields = {
    "backbone_config": {"model_type": "resnet", **RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "num_queries": 10,
    "d_model": 64,
}
RT_DETR: Fields = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [64, 64, 128],
    "decoder_in_channels": [32, 32, 32],
    "d_model": 32,
    "num_queries": 10,
    "num_denoising": 0,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
MASKS: Fields = {"hidden_dim": 32, "num_queries": 10, "decoder_layers": 3}

IMAGES: dict[str, Fields] = {
    **every(("resnet", "rt_detr_resnet"), RESNET),
    "bit": {**RESNET, "num_groups": 4},
    **every(("convnext", "convnextv2"), {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 2, 1, 1]}),
    "focalnet": {"embed_dim": 16, "hidden_sizes": [32, 64, 128, 128], "depths": [1, 1, 1, 1]},
    "levit": {
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [4, 6, 8],
        "depths": [1, 1, 1],
        "patch_size": 16,
        "image_size": 64,
    },
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "image_size": 64},
    **every(("mobilenet_v1", "mobilenet_v2"), {"depth_multiplier": 0.25, "image_size": 64}),
    "mobilevit": {"image_size": 64, "aspp_out_channels": 32},
    "mobilevitv2": {"image_size": 64, "aspp_out_channels": 32},
    "hgnet_v2": {
        "embedding_size": 16,
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [32, 64, 64, 128],
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 32, 64, 64],
        "stage_mid_channels": [8, 16, 16, 32],
        "stage_out_channels": [32, 64, 64, 128],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "cvt": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "pvt": {**PYRAMID, "image_size": 64},
    "pvt_v2": {**PYRAMID, "image_size": [64, 64]},
    **every(("segformer", "glpn"), {**PYRAMID, "decoder_hidden_size": 32}),
    "poolformer": {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]},
    "regnet": {"hidden_sizes": [32, 32, 64, 64], "groups_width": 16, "embedding_size": 16, "depths": [1, 2, 1, 1]},
    "hiera": {"embed_dim": 16, "depths": [1, 1, 2, 1], "image_size": [64, 64]},
    "textnet": {
        "hidden_sizes": [16, 16, 32, 32, 64],
        "stem_out_channels": 16,
        "image_size": [64, 64],
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 3], [1, 3]], [[3, 1]], [[3, 3]]],
        "conv_layer_strides": [[1], [2, 1], [2], [2]],
        "depths": [1, 2, 1, 1],
    },
    "swiftformer": {"embed_dims": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "image_size": 64},
    **every(("swin", "swinv2", "donut-swin", "maskformer-swin"), SWIN),
    "vjepa2": {
        "crop_size": 32,
        "frames_per_clip": 4,
        "num_pooler_layers": 1,
        "pred_hidden_size": 48,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 1,
    },
    # heads on backbones
    "dinov2": {"image_size": 64},
    "beit": {**TWELVE, "out_indices": [1, 2, 3, 4]},
    "data2vec-vision": {**TWELVE, "out_indices": [0, 1, 2, 3], "auxiliary_channels": 32},
    "dpt": {**TWELVE, **DPT, "backbone_out_indices": [0, 1, 2, 3], "patch_size": 8},
    **every(
        ("depth_anything", "prompt_depth_anything"),
        {
            **DPT,
            "reassemble_hidden_size": 64,
            "head_hidden_size": 16,
            "backbone_config.num_hidden_layers": 4,
            "backbone_config.out_indices": [1, 2, 3, 4],
        },
    ),
    "zoedepth": {
        **DPT,
        "bottleneck_features": 32,
        "bin_embedding_dim": 16,
        "num_relative_features": 16,
    },
    "tipsv2_dpt": {
        **DPT,
        "backbone_config.num_hidden_layers": 4,
        "backbone_config.out_indices": [1, 2, 3, 4],
        "backbone_config.image_size": 64,
        "num_depth_bins": 16,
    },
    "chmv2": {
        "post_process_channels": [16, 32, 64, 64],
        "fusion_hidden_size": 32,
        "head_hidden_size": 16,
        "number_output_channels": 16,
        "backbone_config.num_hidden_layers": 4,
        "backbone_config.out_indices": [1, 2, 3, 4],
        "backbone_config.image_size": 64,
    },
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "scaled_images_feature_dims": [64, 64, 32],
        "fusion_hidden_size": 32,
        "merge_padding_value": 1,
        **{f"{part}_model_config.image_size": 32 for part in ("image", "patch", "fov")},
    },
    "upernet": {"auxiliary_channels": 32},
    "sapiens2": {
        "head_config.upsample_out_channels": [32, 32],
        "head_config.conv_out_channels": [32],
        "num_key_value_heads_per_layer": [8, 4],
        "image_size": 64,
    },
    # detection
    **every(("detr", "conditional_detr", "table-transformer"), DETR),
    "dab-detr": {**DETR, "hidden_size": 64},
    "deformable_detr": {
        **DETR,
        "backbone_config": {"model_type": "resnet", **RESNET, "out_features": ["stage2", "stage3", "stage4"]},
    },
    **every(("rt_detr", "rt_detr_v2"), RT_DETR),
    **every(("d_fine", "deimv2"), {**RT_DETR, "lqe_hidden_dim": 16}),
    "pp_doclayout_v2": {
        **RT_DETR,
        "class_thresholds": [0.0, 0.0],
        "class_order": [0, 1],
        "reading_order_config.num_hidden_layers": 1,
    },
    "pp_doclayout_v3": {**RT_DETR, "mask_feature_channels": [16, 16], "x4_feat_dim": 32, "num_prototypes": 8},
    "pp_doclayout_v4": {**RT_DETR, "hidden_size": 32},
    "lw_detr": {
        "num_queries": 10,
        "group_detr": 2,
        "projector_scale_factors": [1.0],
        "projector_out_channels": 64,
        "num_feature_levels": 1,
        "decoder_cross_attention_heads": 8,
        "backbone_config.image_size": 64,
        "backbone_config.num_windows": 4,
        "backbone_config.num_hidden_layers": 4,
        "backbone_config.out_indices": [2, 4],
        "backbone_config.window_block_indices": [0, 2],
    },
    "rf_detr": {
        "num_queries": 10,
        "group_detr": 2,
        "decoder_cross_attention_heads": 8,
        "backbone_config.image_size": 64,
        "backbone_config.num_windows": 2,
        "backbone_config.num_hidden_layers": 4,
        "backbone_config.out_indices": [2, 4],
        "backbone_config.window_block_indexes": [0, 2],
    },
    "grounding-dino": {"num_queries": 10, "max_text_len": 16, "d_model": 64, "fusion_droppath": 0.0},
    "owlvit": {"projection_dim": 64},
    "owlv2": {"projection_dim": 64},
    "yolos": {"image_size": [64, 96], "num_detection_tokens": 10},
    # segmentation
    "mask2former": {
        **MASKS,
        "feature_size": 32,
        "mask_feature_size": 32,
        "encoder_feedforward_dim": 64,
        "dim_feedforward": 64,
    },
    "oneformer": {
        **MASKS,
        "conv_dim": 32,
        "mask_dim": 32,
        "encoder_feedforward_dim": 64,
        "encoder_layers": 2,
        "text_encoder_width": 32,
        "text_encoder_num_layers": 1,
        "task_seq_len": 12,
    },
    "maskformer": {"fpn_feature_size": 32, "mask_feature_size": 32, "decoder_config.num_queries": 10},
    "eomt": {"num_blocks": 1, "num_queries": 10},
    "eomt_dinov3": {"num_blocks": 1, "num_queries": 10},
    "sam": {**SAM, "vision_config.num_pos_feats": 16},
    "sam2": {
        **SAM2,
        "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        "vision_config.fpn_hidden_size": 32,
        "vision_config.backbone_channel_list": [64, 64, 32, 16],
    },
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "image_size": [128, 128],
        "blocks_per_stage": [1, 2, 2, 2],
        "embed_dim_per_stage": [16, 32, 64, 64],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [8, 4, 4, 2],
        "global_attention_blocks": [4, 6],
        "window_positional_embedding_background_size": [4, 4],
    },
    "sam3_tracker": {
        **SAM2,
        "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        "vision_config.fpn_hidden_size": 32,
        "prompt_encoder_config.image_size": 64,
        "prompt_encoder_config.patch_size": 8,
    },
    "sam3_vit_model": {"image_size": 64, "pretrain_image_size": 32, "window_size": 4, "global_attn_indexes": [1]},
    "sam_hq": {**SAM, "vision_config.num_pos_feats": 16, "mask_decoder_config.vit_dim": 64},
}
IMAGES["mm-grounding-dino"] = IMAGES["grounding-dino"]

# -- images and text -----------------------------------------------------------------------------------------------

CODES = {
    "<image>": 250,
    "<|extra_200|>": 201,
    **{f"IMGIMG{'ABCDEFGH'[i // 8]}{'ABCDEFGH'[i % 8]}Z": 160 + i for i in range(64)},
}
VQ: Fields = {
    "vq_config.base_channels": 32,
    "vq_config.channel_multiplier": [1, 2],
    "vq_config.num_res_blocks": 1,
    "vq_config.embed_dim": 32,
    "vq_config.resolution": 32,
}
SAM_TOWER: Fields = {
    "high_res_vision_config.output_channels": 32,
    "high_res_vision_config.window_size": 2,
    "high_res_vision_config.num_pos_feats": 16,
}
PINPOINTS: Fields = {"image_grid_pinpoints": [[32, 64], [64, 32]]}
TEXT: dict[str, Fields] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "paligemma": {"projection_dim": 64, "vision_config.projection_dim": 64},
    "blip-2": {"num_query_tokens": 6, "text_config.word_embed_proj_dim": 64},
    "instructblip": {"num_query_tokens": 6, "text_config.word_embed_proj_dim": 64},
    "instructblipvideo": {"num_query_tokens": 6, "text_config.word_embed_proj_dim": 64},
    "internvl": {"vision_config.image_size": [32, 32], "vision_config.patch_size": [8, 8], "image_seq_length": 4},
    "mllama": {
        "vision_config.intermediate_layers_indices": [0, 1],
        "vision_config.num_global_layers": 2,
        "vision_config.vision_output_dim": 192,
        "vision_config.max_num_tiles": 4,
        "text_config.cross_attention_layers": [1],
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen2_vl": {"text_config.rope_parameters": MROPE, "vision_config.embed_dim": 64},
    "qwen2_5_vl": {
        "text_config.rope_parameters": MROPE,
        "vision_config.window_size": 32,
        "vision_config.out_hidden_size": 64,
        "vision_config.fullatt_block_indexes": [1],
    },
    **{name: {"text_config.rope_parameters": MROPE} for name in ("glm4v", "glm46v", "glm_ocr")},
    **every(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), PINPOINTS),
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
    "cosmos3_edge": {"text_config.rope_parameters": MROPE},
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
        "text_config.moe_intermediate_size": [32, 16],
    },
    "glm4v_moe": {"text_config.rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "paddleocr_vl": {"text_config.rope_parameters": MROPE},
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": 248,
        "text_config.rope_parameters": MROPE,
        "vision_config.window_size": 32,
        "vision_config.out_hidden_size": 64,
        "vision_config.fullatt_block_indexes": [1],
    },
    "hunyuan_vl": {
        "text_config.head_dim": 8,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "xdrope_section": [1, 1, 1, 1]},
    },
    "llama4": {
        "vision_config.intermediate_size": 256,
        "vision_config.projector_input_dim": 64,
        "vision_config.projector_output_dim": 64,
        "vision_config.vision_output_dim": 64,
    },
    **every(
        ("gemma4", "gemma4_unified"),
        {"__defaults__": {"vision_config": {}, "audio_config": {}}, "audio_config.output_proj_dims": 64},
    ),
    "kimi_k25": {"vision_config.projection_hidden_size": 64},
    "deepseek_vl_hybrid": {"high_res_vision_config.global_attn_indexes": [0, 1], **SAM_TOWER},
    "exaone4_5": {"vision_config.window_size": 32, "vision_config.fullatt_block_indexes": [1]},
    "vipllava": {"vision_feature_layers": [0, 1, 2]},
    "chameleon": {"vocabulary_map": CODES, "vq_config.num_embeddings": 64, **VQ},
    "emu3": {"vocabulary_map": CODES, "vq_config.codebook_size": 64, **VQ},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8},
    "glm5_next": {"text_config.index_kpool": 2},
    "granite4_vision": {
        **PINPOINTS,
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
        "image_seq_length": 16,
    },
    "molmo2": {
        "adapter_config.vision_feature_layer": [1, 0],
        "adapter_config.text_hidden_size": 64,
        "vision_config.image_size": [32, 32],
        "vision_config.num_position_embeddings": 16,
    },
    "muse_spark": {
        "audio_config.patch_sizes": [4, 3],
        "audio_config.hidden_sizes": [16, 32],
        "audio_config.depths": [1, 1],
        "audio_config.num_hidden_layers": 2,
    },
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        **{f"vision_config.sam_config.{key.partition('.')[2]}": value for key, value in SAM_TOWER.items()},
        "vision_config.sam_config.downsample_channels": [32, 64],
        "vision_config.sam_config.global_attn_indexes": [1],
    },
    "step3p7": {"text_config.sliding_window": 8},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 11, "no_token_index": 12},
    "kosmos-2": {
        "latent_query_num": 6,
        "text_config.layers": 2,
        "text_config.embed_dim": 64,
        "text_config.attention_heads": 8,
        "text_config.ffn_dim": 128,
    },
    "kosmos-2.5": {
        "latent_query_num": 6,
        "text_config.layers": 2,
        "text_config.embed_dim": 64,
        "text_config.attention_heads": 8,
        "text_config.ffn_dim": 128,
        "vision_config.patch_embed_hidden_size": 192,
        "vision_config.max_num_patches": 64,
    },
    "janus": {
        "vision_config.projection_dim": 64,
        "vq_config.num_embeddings": 64,
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 2],
        "vq_config.num_res_blocks": 1,
        "vq_config.latent_channels": 32,
        "vq_config.projection_dim": 64,
        "vq_config.image_token_embed_dim": 64,
    },
    "hyperclovax_vision_v2": {
        "vision_config.window_size": 32,
        "vision_config.out_hidden_size": 64,
        "vision_config.fullatt_block_indexes": [1],
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 248},
    "unlimited_ocr": {
        **{f"vision_config.sam_config.{key.partition('.')[2]}": value for key, value in SAM_TOWER.items()},
        "vision_config.sam_config.downsample_channels": [32, 64],
        "vision_config.sam_config.global_attn_indexes": [1],
    },
    **every(("muse_glimmer", "muse_spark"), {"out_hidden_size": 256, "projector_hidden_size": 64}),
    "blip_2_qformer": {"use_qformer_text_input": True},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10, "input_size": 32},
    "clvp": {},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "voxtral_realtime": {"audio_config.max_position_embeddings": 64},
    "pix2struct": {"vision_config.patch_embed_hidden_size": 192, "vision_config.seq_len": 32},
    "pp_formulanet": {
        "vision_config.post_conv_in_channels": 32,
        "vision_config.output_channels": 32,
        "vision_config.post_conv_mid_channels": 32,
        "vision_config.post_conv_out_channels": 64,
        "vision_config.decoder_hidden_size": 64,
        "vision_config.window_size": 2,
        "vision_config.global_attn_indexes": [1],
    },
}

FIELDS: dict[str, Fields] = {**AUDIO, **IMAGES, **TEXT}
