"""`paraxis generate`: the text of the parallel model is that of the unsharded one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli.helpers import call
from transformers import AutoConfig, AutoModelForCausalLM


def save_tokenizer(folder: str) -> None:
    """One word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@pytest.fixture
def model(folder: str, tmp_path: Path) -> str:
    """A checkpoint without a tokenizer."""
    place = str(shutil.copytree(folder, tmp_path / "model"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)).save_pretrained(place)
    return place


def test_the_text_is_that_of_the_unsharded_model(model: str) -> None:
    save_tokenizer(model)
    found = call("generate", model, "--prompt", "w3 w5 w7", "--max-new-tokens", "5", "--no-stream")
    expected = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor([[3, 5, 7]]), max_new_tokens=5, do_sample=False
    )
    assert found.exit_code == 0, found.stderr
    assert found.stdout.split() == [f"w{token}" for token in expected[0, 3:].tolist()]


def test_without_a_tokenizer(model: str) -> None:
    found = call("generate", model, "--prompt", "w3 w5")
    assert found.exit_code == 1 and len(found.stderr.strip().splitlines()) == 1
    assert f"cannot load a tokenizer for {model!r}: put its tokenizer.json next to the weights" in found.stderr
