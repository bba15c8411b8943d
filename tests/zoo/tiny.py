"""Tiny configurations of any transformers model type, made by shrinking the default one field by field.

Fields are recognised by name, since model types share most of them; fields with other names and sizes that must agree
are in `quirks`. Lists with an entry per layer (``layer_types``) keep one layer of every kind.
"""

from __future__ import annotations

from typing import Any

from zoo.quirks import QUIRKS

LAYERS = 2
WIDTHS: dict[str, int] = {
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "pronunciation_vocab_size"), 256
    ),
    **dict.fromkeys(("shape_vocab_size", "audio_vocab_size", "encoder_hash_byte_group_vocab", "codebook_size"), 256),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim", "lru_width"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("backbone_hidden_size", "out_hidden_size", "input_size", "entity_emb_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff", "dim_ff", "d_inner"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "feed_forward_size", "mlp_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "mamba_d_ssm", "hidden_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 8),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "conf_num_attention_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_query_groups"), 4),
    **dict.fromkeys(("num_global_key_value_heads", "swa_num_kv_heads"), 4),
    **dict.fromkeys(
        ("head_dim", "d_kv", "kv_channels", "dim_head", "d_head", "attention_head_size", "swa_head_dim"), 8
    ),
    **dict.fromkeys(("attention_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("global_head_dim", "index_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 32),
    **dict.fromkeys(("laurel_rank", "gated_norm_rank", "adapter_rank", "hidden_size_per_layer_input"), 16),
    "qk_head_dim": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("linear_num_key_heads",), 4),
    **dict.fromkeys(("linear_num_value_heads", "index_n_heads"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"), 128),
    **dict.fromkeys(("original_max_position_embeddings", "context_length", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "local_attention"), 8),
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size", "block_size", "rel_extent"), 8),
    **dict.fromkeys(("image_size", "crop_size"), 32),
    "patch_size": 8,
    "rotary_dim": 4,
    "n_group": 2,
    "topk_group": 1,
    "index_topk": 4,
    "num_mel_bins": 16,
    "max_source_positions": 32,
}
"""The size of every field of this name, unless the default is smaller or off."""

COUNTS = (
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
    + ("num_encoder_layers", "num_decoder_layers", "num_blocks", "depth", "conf_num_hidden_layers")
    + ("num_layers_per_stack",)
)
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers", "layer_block_types")
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OFF = ("dropout", "drop_rate", "pdrop", "layerdrop", "drop_path", "drop_prob")


def tiny_config(model_type: str, quirks: dict[str, dict[str, Any]] = QUIRKS, **overrides: Any) -> Any:
    """The configuration of a tiny model of this type; overrides are fields, dotted ones of a sub-configuration.

    ``quirks`` are the fields that single types need, also where they are sub-configurations.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return shrink(CONFIG_MAPPING[model_type], {**quirks.get(model_type, {}), **overrides}, quirks)


def shrink(
    config_class: Any,
    overrides: dict[str, Any],
    quirks: dict[str, dict[str, Any]] = QUIRKS,
    before: dict[str, Any] | None = None,
) -> Any:
    """A configuration of this class with small sizes; ``before`` are fields of it that are not the class's defaults."""
    overrides = dict(overrides)
    before = {**(before or {}), **overrides.pop("__defaults__", {})}
    defaults = config_class(**before)
    plain = defaults.to_dict()
    fields = {**before, **_small(plain, overrides)}
    for name in getattr(config_class, "sub_configs", {}):
        inner = getattr(defaults, name, None)
        if inner is None or isinstance(inner, dict):
            continue
        prefix = f"{name}."
        own = {key[len(prefix) :]: value for key, value in overrides.items() if key.startswith(prefix)}
        shared = {key: value for key, value in overrides.items() if key in FOR_ALL}
        own = {**shared, **quirks.get(inner.model_type, {}), **own}
        fields[name] = shrink(type(inner), own, quirks, of_backbone(inner)).to_dict()
    fields |= {key: value for key, value in overrides.items() if "." not in key}
    return config_class(**fields)


def of_backbone(config: Any) -> dict[str, Any]:
    """What a model has chosen of its backbone: flags, and the results to take where it has as many stages when tiny."""
    if not getattr(config, "out_features", None):
        return {}
    flags = {key: value for key, value in config.to_dict().items() if isinstance(value, bool)}
    if isinstance(getattr(config, "depths", None), (list, tuple)):
        flags["out_features"] = config.out_features
    return flags


FOR_ALL = ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Overrides that also apply to sub-configurations."""


def _small(plain: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    kinds = {key: list(dict.fromkeys(plain[key])) for key in LISTS if isinstance(plain.get(key), list)}
    depth = max([LAYERS, *(len(found) for found in kinds.values())])
    depth = overrides.get("num_hidden_layers", depth)
    for key, found in kinds.items():
        fields[key] = [found[min(i, len(found) - 1)] for i in range(depth)]
    for key, value in plain.items():
        if isinstance(value, bool) or key in fields:
            continue
        if key in COUNTS and isinstance(value, int):
            fields[key] = depth if key == "num_hidden_layers" else min(value, LAYERS) if value else value
        elif key in WIDTHS and isinstance(value, int):
            fields[key] = WIDTHS[key] if key.endswith(HEADS) else min(value, WIDTHS[key])
        elif key in TOKENS and isinstance(value, (int, list)):
            fields[key] = TOKENS[key]
        elif isinstance(value, float) and any(word in key for word in OFF):
            fields[key] = 0.0
    if plain.get("kv_lora_rank") and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = overrides.get("num_attention_heads", fields["num_attention_heads"])
    return fields
