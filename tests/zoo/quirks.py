"""What single model types need in addition to the general shrinking: other fields, or sizes that must agree."""

from __future__ import annotations

from typing import Any

HEAD = {"head_dim": 8}
MIXED = ["linear_attention", "full_attention"]

QUIRKS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 2, "topk_group": 1, "num_experts": 8},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"n_group": 2, "topk_group": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config.clip_qkv": 8.0,
        "attn_config.rope_theta": 10000.0,
        "attn_config.kv_n_heads": 4,
        "ffn_config.hidden_size": 64,
        "ffn_config.ffn_hidden_size": 128,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gpt_neo": {"__defaults__": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}},
    "granitemoehybrid": {"layer_types": MIXED},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 4},
    "mamba2": {"num_heads": 16},
    "ministral": HEAD,
    "nemotron": {"num_key_value_heads": 4},
    "phi4_multimodal": {
        "audio_config.nemo_conv_channels": 32,
        "audio_config.ext_pw_out_channel": 64,
        "audio_config.depthwise_separable_out_channel": 64,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlstm": {"qk_dim_factor": 1.0, "weight_mode": "single"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 16,
    },
    "zamba2": {"attention_head_dim": 16, "num_key_value_heads": 8, "n_mamba_heads": 16},
}
