"""A structurally diverse selection of the zoo; `make zoo` runs all of it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from zoo.__main__ import run, split_names
from zoo.modules import module_cases
from zoo.table import page

TRANSFORMERS = {
    "mixtral": 2,  # fused experts, saved separately
    "t5*": 2,  # encoder-decoder, relative position table
    "wav2vec2*": 2,  # convolutions with weight norm
}
LONG = {
    "clip*": 2,  # two towers
    "musicgen": 2,  # several codebooks and heads
    "bamba": 2,  # selective scan, depthwise convolution, a state written in place; attention layers too
    "deepseek_v3": 2,  # latent attention, groups of experts
    "qwen3_next": 2,  # linear attention and full attention
    "swin-image*": 2,  # windows
    "phi3[num_attention_heads=8,num_key_value_heads=2,vocab_size=251]": 4,
}
OPTIONS = Namespace(device="cpu", timeout=300.0)


def assert_right(record: dict[str, Any]) -> None:
    """The model equals the unsharded one, and a rank holds little more than its share."""
    assert record["status"] == "ok", record.get("error") or record
    assert record["fraction"] <= {2: 0.55, 4: 0.30}[record["world"]]


@pytest.mark.parametrize("name", [*TRANSFORMERS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_model_equals_the_unsharded_one(name: str, ranks: Any) -> None:
    world = {**TRANSFORMERS, **LONG}[name]
    record = run(name, world, ranks(world), OPTIONS)
    assert_right(record)
    assert not record["breaks"]


def test_plain_modules_equal_the_unsharded_ones(ranks: Any) -> None:
    records = [run(case.name, 2, ranks(2), OPTIONS) for case in module_cases()]
    for record in records:
        assert_right(record)
    broken = {record["name"]: record["breaks"] for record in records if record["breaks"]}
    assert list(broken) == ["DataDependent"] and "if x.mean().item() > 100" in broken["DataDependent"][0]
    text = page(records)
    assert f"{len(records)} of {len(records)} right" in text and "| DataDependent | 2 | ok |" in text


def test_commas_inside_brackets_do_not_split_names() -> None:
    assert split_names("llama,phi3[a=1,b=2],gpt2*") == ["llama", "phi3[a=1,b=2]", "gpt2*"]
