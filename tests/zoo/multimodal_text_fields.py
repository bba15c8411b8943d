"""Fields of tiny models that take text with images, videos or audio; see :mod:`zoo.multimodal_fields`."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def every(types: tuple[str, ...], fields: Fields) -> dict[str, Fields]:
    """These fields for each of the types."""
    return {kind: fields for kind in types}


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CODES = {
    "<image>": 250,
    "<|extra_200|>": 201,
    **{f"IMGIMG{'ABCDEFGH'[i // 8]}{'ABCDEFGH'[i % 8]}Z": 160 + i for i in range(64)},
}
VISUAL = {"<image>": 250, "<|extra_200|>": 201, **{f"<|visual token {i:06d}|>": 110 + i for i in range(64)}}
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
    "kimi_k25": {"projection_hidden_size": 64},
    "deepseek_vl_hybrid": {"high_res_vision_config.global_attn_indexes": [0, 1], **SAM_TOWER},
    "exaone4_5": {"vision_config.window_size": 32, "vision_config.fullatt_block_indexes": [1]},
    "vipllava": {"vision_feature_layers": [0, 1, 2]},
    "chameleon": {"vocabulary_map": CODES, "vq_config.num_embeddings": 64, **VQ},
    "emu3": {"vocabulary_map": VISUAL, "vq_config.codebook_size": 64, **VQ},
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
