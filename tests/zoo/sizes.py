"""Sizes that are not divisible by the ranks: few KV heads, odd vocabularies and widths, more ranks than KV heads."""

from __future__ import annotations

TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "starcoder2", "stablelm", "olmo", "olmo2") + (
    "cohere",
    "granite",
    "nemotron",
    "glm",
    "smollm3",
    "arcee",
    "exaone4",
    "mixtral",
    "qwen3_moe",
    "apertus",
)

SETS = {
    4: (
        {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 251},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 134, "hidden_size": 48},
    ),
    8: ({"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112},),
}
"""Fields of the configurations, by number of ranks."""


def odd_sizes() -> list[tuple[str, int]]:
    """(name of the case, number of ranks)"""
    found = []
    for world, sets in SETS.items():
        for fields in sets:
            text = ",".join(f"{key}={value}" for key, value in fields.items())
            found += [(f"{name}[{text}]", world) for name in TYPES]
    return found
