"""The commands, called as a user does: what they print. How they fail is in test_cli_errors.py."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from transformers import LlamaConfig
from typer.testing import CliRunner

from paraxis.cli import app
from paraxis.solver import machine_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with nothing but a configuration."""
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=96,
    ).save_pretrained(path)
    return str(path)


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    torch._dynamo.reset()
    return result


def test_help_needs_no_torch() -> None:
    code = "import sys, paraxis.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    text = call("--help").output
    assert all(
        name in text for name in ("plan", "explain", "diff", "verify", "generate", "bench", "doctor", "calibrate")
    )


def test_plan_and_diff(folder: str, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    plain = call("plan", folder, "--tp", "2", "--json", "--save", files[0])
    assert plain.exit_code == 0, plain.output
    data = json.loads(plain.stdout)
    assert {layer["name"]: layer["axis"] for layer in data["layers"]}["lm_head"] == "column"
    assert data["optimal"] and data["seconds"] > 0
    other = call("plan", folder, "--tp", "2", "-c", "*.down_proj=column", "--machine", "pcie", "--save", files[1])
    assert other.exit_code == 0, other.output
    assert "Plan for 2 ranks" in other.output and "the cheapest plan there is" in other.output
    found = call("diff", *files)
    assert found.exit_code == 0 and "layer model.layers.*.mlp.down_proj: row | column" in found.output
    assert json.loads(call("diff", *files, "--json").stdout)["differences"]


def test_explain(folder: str) -> None:
    found = call("explain", folder, "lm_head", "--tp", "2")
    assert found.exit_code == 0, found.output
    assert found.output.startswith("lm_head.weight [96×32] over 2 ranks: split on dimension 0 (column)")
    assert "µs per pass" in found.output


def test_calibrate(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    found = call("calibrate", "--tp", "2", "--out", str(out))
    assert found.exit_code == 0, found.output
    machine = machine_of(out)
    assert machine.flops > 1e8 and machine.memory > 1e7
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert 1e-7 < machine.links[kind].latency < 1.0 and machine.links[kind].bandwidth > 1e6
    assert "2 ranks, measured on" in machine.name


def test_code(folder: str) -> None:
    """The program parses, is grouped by module, and shows every collective of the plan with its reason."""
    found = call("code", folder, "--tp", "2", "--rank", "1")
    assert found.exit_code == 0
    ast.parse(found.stdout)
    plan = json.loads(call("plan", folder, "--tp", "2", "--json").stdout)
    assert found.stdout.count("<== COLLECTIVE") == len(plan["collectives"])
    assert "# The program of rank 1 of 2." in found.stdout and "\n    # model.layers.0.self_attn\n" in found.stdout
    assert "RowParallelLinear['model.layers.0.mlp.down_proj']" in found.stdout
    assert "partial sums; weight [32, 32] of [32, 64]" in found.stdout
    assert "COLLECTIVE: sums of a row-parallel layer" in found.stdout


@long
def test_as_few_ranks_as_fit(folder: str) -> None:
    """A rank of two has to fit, one alone must not."""
    short = ("--context", "8", "--json")
    whole = json.loads(call("plan", folder, "--tp", "1", *short).stdout)["memory"]["total"]
    found = call("plan", folder, "--tp", "auto", "--gpu", f"toy-{whole / 0.9 * 0.8 / 1e9:.9f}GB", *short)
    data = json.loads(found.stdout)
    assert data["world_size"] == 2 and data["memory"]["total"] < 0.8 * whole
    never = call("plan", folder, "--tp", "auto", "--gpu", "toy-0.000000001GB")
    assert never.exit_code == 1 and "no number of ranks up to" in never.stderr


def test_a_page(folder: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert call("plan", folder, "--tp", "2", "--html", str(page)).exit_code == 0
    assert "o_proj" in page.read_text() and "row-parallel" in page.read_text()
    nowhere = call("plan", folder, "--tp", "2", "--html", str(tmp_path / "no" / "plan.html"))
    assert nowhere.exit_code == 1 and "there is no directory" in nowhere.stderr


def test_verify(folder: str, tmp_path: Path) -> None:
    """From a configuration alone: random weights, one layer."""
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(Path(folder, "config.json").read_text())
    found = call("verify", str(config), "--tp", "2", "--layers", "1", "--train", "--generate", "--json")
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and data["agreed"] and data["weights"] == "random weights, 1 layers"
    assert data["world_size"] == len(data["checks"]) == 2 and data["sharded_fraction"] < 0.55
    names = [check["name"] for check in data["checks"][0]]
    assert names == ["logits (max abs)", "loss (abs)", "gradients (relative)", "tokens (differing)"]


@long
def test_bench(folder: str) -> None:
    options = ("--tp", "2", "--layers", "1", "--prompt", "8", "--tokens", "3", "--json")
    found = call("bench", folder, *options)
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and data["weights"] == "random weights, 1 layers"
    ours, alone = data["parallel"], data["alone"]
    assert all(each[key] > 0 for each in (ours, alone) for key in ("load", "first", "prompt", "token", "memory"))
    assert ours["parameters"] < 0.55 * alone["parameters"] and ours["collectives"] == 4 and ours["plan"] > 0
    assert ours["training"] is None and alone["collectives"] == 0


def test_what_differs_is_seen() -> None:
    from paraxis.cli._checks import Outputs, checks_table, compare

    def made(shift: float, token: int) -> Outputs:
        ones = torch.ones(2, 3)
        return Outputs({"logits": ones + shift}, ones.sum() + shift, {"w": ones, "b": None}, torch.tensor([[token]]))

    same = compare(made(0.0, 1), made(0.0, 1))
    assert all(check.passed for check in same)
    other = compare(made(1e-3, 2), made(0.0, 1))
    assert [check.passed for check in other] == [False, False, True, False]
    assert not compare(Outputs(), made(0.0, 1))[0].passed, "nothing is not the same as something"
    missing = made(0.0, 1)
    missing.gradients = {"w": None, "b": None}
    assert not compare(missing, made(0.0, 1))[2].passed
    missing.gradients = {"w": torch.full((2, 3), float("nan")), "b": None}
    assert not compare(missing, made(0.0, 1))[2].passed
    assert checks_table([same, other]).row_count == 4


def save_tokenizer(folder: str) -> None:
    """One word per token, as many as the vocabulary has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@long
def test_generate(folder: str, tmp_path: Path) -> None:
    """The text is that of the unsharded model; without a tokenizer the error is a line."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    place = str(shutil.copytree(folder, tmp_path / "model"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)).save_pretrained(place)
    bare = call("generate", place, "--prompt", "w3 w5")
    assert bare.exit_code == 1 and "Traceback" not in bare.stderr and len(bare.stderr.strip().splitlines()) == 1
    assert place in bare.stderr and "tokenizer.json" in bare.stderr
    save_tokenizer(place)
    found = call("generate", place, "--prompt", "w3 w5 w7", "--max-new-tokens", "5", "--no-stream")
    expected = AutoModelForCausalLM.from_pretrained(place).generate(
        torch.tensor([[3, 5, 7]]), max_new_tokens=5, do_sample=False
    )
    assert found.exit_code == 0
    assert found.stdout.split() == [f"w{token}" for token in expected[0, 3:].tolist()]
    assert call("generate", place, "--prompt", "").exit_code == 2


def test_doctor() -> None:
    found = call("doctor", "--json")
    data = {finding["what"]: finding for finding in json.loads(found.stdout)}
    assert found.exit_code == 0
    assert torch.__version__.startswith(data["torch"]["found"]) and data["two ranks"]["found"].endswith("added up to 3")
    assert all(finding["verdict"] != "bad" for finding in data.values())


def test_only_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that another launcher has started all run the command."""
    from paraxis.cli import demo

    report = demo.RankReport(0, 1.0, 2.0, 0.1, 1.0, 100.0, agreed=True)
    monkeypatch.setattr(demo, "launch", lambda *_: [report])
    monkeypatch.setattr(demo, "save_model", lambda _: 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        found = call("demo", "--tp", "2")
        assert found.exit_code == 0 and bool(found.stdout) == speaks and not found.stderr
    monkeypatch.setenv("RANK", "0")
    assert json.loads(call("demo", "--json").stdout)["agreed"]
