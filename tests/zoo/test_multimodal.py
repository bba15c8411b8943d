"""The page of multimodal models: what is right, wrong, not built and not run, by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo.jobs import first_line, results_in
from zoo.multimodal import right
from zoo.multimodal_cases import AT_FOUR, all_names, task_of
from zoo.multimodal_page import answer, made_by, names_at, page, reason

GOOD = {"status": "ok", "outputs": 1e-6, "gradients": 1e-5, "fraction": 0.51, "unplanned": 0, "breaks": []}


def record(name: str, **more: Any) -> dict[str, Any]:
    """A result as the zoo notes it."""
    measured = {} if "error" in more else GOOD
    return {"name": name, "task": task_of(name), "modality": "pixel_values", "commit": "abc", **measured, **more}


LLAVA, GIT = "llava:LlavaForConditionalGeneration", "git:GitForCausalLM"
GEMMA, WAV = "gemma3n:Gemma3nForConditionalGeneration", "wav2vec2:Wav2Vec2ForCTC"


def test_the_page_counts_by_task_and_lists_what_was_not_run() -> None:
    towers = {"model.vision_tower": 0.95, "model.language_model": 1.0}
    two = [
        record(LLAVA, tokens=True, towers=towers, work=0.99),
        record(GIT, status="failed", error="RankError: File x\n  line\nTypeError: it | fell\n\nrank 1 too"),
        record(GEMMA, status="not built", error="ImportError: no timm"),
        record(WAV, status="wrong", outputs=0.5),
        record("aimv2:Aimv2Model", status="wrong", outputs=0.5),
    ]
    text = page({2: two, 4: [record(LLAVA, fraction=0.27)]})
    vision = sum(task_of(n) == "IMAGE_TEXT_TO_TEXT" for n in all_names())
    four = sum(task_of(n) == "IMAGE_TEXT_TO_TEXT" for n in names_at(4))
    assert 0 < four < vision and all(n.partition(":")[0] in AT_FOUR for n in names_at(4))
    assert f"| Image text to text | 1 | 1 | {vision - 3} | 1 | 0 | {four - 1} | 1 |" in text
    assert (
        "**2 ranks**: 1 of 4 models are right, and 0 more in float64 only. With images, videos or audio, 1 are" in text
        and "Of 1 of the 1 whose" in text
    )
    assert ", commit abc." in text and "| 0.51 | 0 | 95% | yes | yes | yes | one |" in text
    assert "NO: TypeError: it / fell" in text and "NO: outputs 5e-01" in text
    assert "| gemma3n | Gemma3nForConditionalGeneration | ImportError: no timm |" in text
    left = text.partition("## Not run")[2]
    assert f"{len(all_names()) - 5} types" in left and LLAVA not in left and "blip:" in left


def test_exceptions_have_the_reasons_of_the_plan() -> None:
    unshared = {"model.vision_tower": [("model.vision_tower.layers.*.fc", 0.5, "every way to shard it costs more")]}
    towers = {"model.vision_tower": 0.5}
    many = [("model.embed.weight", 1.0, 0.1, "no rule for aten.mode")]
    found = [record(LLAVA, fraction=0.62, excess=many), record(GIT, towers=towers, unshared=unshared)]
    text = page({2: found})
    assert "| LlavaForConditionalGeneration | 2 | 0.62 of the parameters | `model.embed.weight`: 100% on a rank" in text
    assert "| GitForCausalLM | 2 | 50% of `model.vision_tower` | `model.vision_tower.layers.*.fc`, 50%: every" in text
    assert "## Exceptions" not in page({2: [record(LLAVA)]})


def test_the_head_is_one_line_where_all_results_are_of_one_commit() -> None:
    one, other = record(LLAVA, versions="torch 1"), record(GIT, versions="torch 1", commit="def")
    assert made_by({2: [one]}) == "torch 1, commit abc."
    rounded = answer(record(LLAVA, outputs=4e-4, gradients=1e-5))
    assert rounded == "in float64" and answer(record(LLAVA, outputs=0.0, gradients=0.0)) == "yes"
    assert made_by({2: [one, other]}) == "torch 1: 2 results, of commit abc, def."


def test_a_model_is_right_if_all_that_was_compared_is() -> None:
    assert (
        right(record(LLAVA)) and right(record(LLAVA, tokens="unsharded model: no")) and right(record(LLAVA, text=None))
    )
    assert not right(record(LLAVA, tokens=False)) and not right(record(LLAVA, text=0.1))
    assert not right(record(LLAVA, gradients=0.1)) and right(record(LLAVA, gradients=0.1, rounded=True))
    assert not right(record(LLAVA, outputs=float("inf")))
    assert not right(record(LLAVA, outputs=4e-4)) and right(record(LLAVA, outputs=4e-4, rounded_outputs=True))


def test_reasons_are_what_was_raised() -> None:
    assert reason("RankTimeout: somewhere") == "no result in time" and reason("ValueError: x\ny") == "ValueError: x"
    assert reason("RankError: a\nb") == "RankError: a" and reason("odd\nlast") == "last"


def test_the_latest_result_of_a_name_counts(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    assert results_in(state, 2) == results_in(None, 2) == {}
    found = [{"name": "a", "world": 2, "n": 1}, {"name": "a", "world": 4, "n": 2}, {"name": "a", "world": 2, "n": 3}]
    state.write_text("\n".join(map(json.dumps, found)))
    assert results_in(state, 2)["a"]["n"] == 3 and results_in(state, 4)["a"]["n"] == 2
    assert first_line(ValueError("\n\nreason\nmore")) == "ValueError: reason" and first_line(KeyError()) == "KeyError: "
