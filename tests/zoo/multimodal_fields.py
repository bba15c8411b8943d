"""Fields of tiny models that take images, videos or audio: those that have to agree with others, and lists of sizes.

By model type; they also apply where the type is a sub-configuration. :mod:`zoo.tiny` shrinks everything else.
"""

from __future__ import annotations

from zoo.multimodal_text_fields import TEXT, Fields, every

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
    "qwen3_asr": {"audio_config.output_dim": 64, "audio_config.downsample_hidden_size": 32},
    **every(
        tuple(f"vibevoice_{what}" for what in ("acoustic_tokenizer", "acoustic_tokenizer_encoder")),
        # No noise: like dropout, a program draws it from its own seeds, not from those of the unsharded model.
        {"num_filters": 4, "downsampling_ratios": [2, 2, 4, 5], "depths": [1, 1, 1, 1, 1], "vae_std": 0.0},
    ),
    **every(("vibevoice", "vibevoice_asr"), {"acoustic_tokenizer_chunk_size": 1600}),
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
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 2},
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

FIELDS: dict[str, Fields] = {**AUDIO, **IMAGES, **TEXT}
