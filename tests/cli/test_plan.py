"""`paraxis plan`: the table, JSON, the report, and the smallest number of ranks that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.helpers import call

from paraxis.cli.plan import QUANTIZATIONS, show
from paraxis.plan import Memory, Plan
from paraxis.weights.quantized.registry import NAMED


def test_json_and_saved_plan(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = call("plan", folder, "--tp", "2", "--json", "--save", str(file))
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert {layer["name"]: layer["axis"] for layer in data["layers"]}["lm_head"] == "column"
    assert data["optimal"] and data["seconds"] > 0 and data["seconds_to_plan"] > 0
    assert Plan.load(str(file)).to_json()["layers"] == data["layers"]


def test_the_table_shows_collectives_and_memory(folder: str) -> None:
    found = call("plan", folder, "--tp", "2", "-c", "*.down_proj=column", "--machine", "pcie", "--gpu", "24GB")
    assert found.exit_code == 0, found.output
    assert "Plan for 2 ranks" in found.output and "This plan is optimal under the cost model." in found.output
    (row,) = [line for line in found.output.splitlines() if "self_attn.o_proj" in line and "linear" in line]
    assert "row" in row and "sharded" in row and "all-reduce" in row
    assert "Collectives per forward pass:" in found.output and "partial output of a row-parallel layer" in found.output
    assert "Fits on 24GB (limit: 90% of its memory)." in found.output


def test_filter_shows_only_the_layers_that_match(folder: str) -> None:
    found = call("plan", folder, "--tp", "2", "--filter", "*.down_proj")
    assert found.exit_code == 0, found.output
    rows = [line for line in found.output.splitlines() if "linear" in line and "│" in line]
    assert len(rows) == 1 and "mlp.down_proj" in rows[0]
    assert "Collectives per forward pass:" in found.output


def test_filter_without_a_match_names_some_layers(folder: str) -> None:
    found = call("plan", folder, "--tp", "2", "--filter", "down_proj")
    assert found.exit_code != 0 and "matches no layer" in found.stderr and "model.embed_tokens" in found.stderr


def test_filter_is_for_the_table_alone(folder: str) -> None:
    found = call("plan", folder, "--tp", "2", "--filter", "*", "--json")
    assert found.exit_code != 0 and "--filter is for the table" in found.stderr


@pytest.mark.parametrize(("optimal", "gpu", "text"), [(True, "24GB", "Fits on"), (False, "0.001GB", "Does not fit on")])
def test_the_summary_says_whether_it_fits_and_is_optimal(
    optimal: bool, gpu: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(Plan(2, seconds=2e-3, communication=1e-3, optimal=optimal, memory=Memory(2_000_000, 0)), gpu, as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{text} {gpu}" in said and "Estimated 2.000 ms per forward pass, 50% of it in collectives." in said
    assert ("may not be optimal" not in said) == optimal


def test_the_smallest_number_of_ranks_that_fits(folder: str) -> None:
    """Two ranks must fit, one must not."""
    short = ("--context", "8", "--json")
    unsharded = json.loads(call("plan", folder, "--tp", "1", *short).stdout)["memory"]["total"]
    found = call("plan", folder, "--tp", "auto", "--gpu", f"toy-{unsharded / 0.9 * 0.8 / 1e9:.9f}GB", *short)
    data = json.loads(found.stdout)
    assert data["world_size"] == 2 and data["memory"]["total"] < 0.8 * unsharded and data["fits"]
    never = call("plan", folder, "--tp", "auto", "--gpu", "toy-0.000000001GB")
    assert never.exit_code == 1 and "does not fit on 64 ranks or fewer" in never.stderr


def test_html_writes_a_report(folder: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert call("plan", folder, "--tp", "2", "--html", str(page)).exit_code == 0
    assert "o_proj" in page.read_text() and "row-parallel" in page.read_text()


def test_a_plain_checkpoint_that_is_quantized_while_it_is_loaded(folder: str) -> None:
    assert list(QUANTIZATIONS) == list(NAMED)
    found = call("plan", folder, "--tp", "2", "--quantization", "int8")
    assert found.exit_code == 0, found.output
    assert "parameters are quantized (compressed-tensors" in " ".join(found.output.split())
    found = call("plan", folder, "--quantization", "int3")
    assert found.exit_code == 2 and "--quantization 'int3': use one of fp8, int8, int4, nf4" in found.output


def test_one_rank_has_no_collectives(folder: str) -> None:
    found = call("plan", folder, "--tp", "1")
    assert found.exit_code == 0 and "Collectives per forward pass: none." in found.output
    assert "of it in collectives" not in found.output and "all-reduce" not in found.output
    rows = [line for line in found.output.splitlines() if "│" in line and "linear" in line]
    assert rows and all("replicated" in row and "column" not in row and "sharded" not in row for row in rows)


@pytest.mark.parametrize("machine", [[], ["--machine", "h100"]])
def test_one_rank_spends_no_time_on_collectives(folder: str, machine: list[str]) -> None:
    data = json.loads(call("plan", folder, "--tp", "1", *machine, "--json").stdout)
    assert data["communication"] == 0 < data["seconds"] and not data["collectives"]
    two = json.loads(call("plan", folder, "--tp", "2", *machine, "--json").stdout)
    assert 1.2 < data["seconds"] / (two["seconds"] - two["communication"]) < 2.2, "one rank computes what two share"


def test_the_estimated_time_is_that_of_the_context(folder: str) -> None:
    """More tokens take longer; the time of the plan itself, which is compared by `diff`, stays."""
    short, long = (json.loads(call("plan", folder, "--context", n, "--json").stdout) for n in ("16", "4096"))
    assert short["seconds"] == long["seconds"]
    assert 0 < short["memory"]["communication"] < short["memory"]["seconds"] < long["memory"]["seconds"]
    found = call("plan", folder, "--context", "4096")
    text = f"Estimated {long['memory']['seconds'] * 1e3:.3f} ms per forward pass of 1 × 4096 tokens"
    assert text in " ".join(found.output.split())


def test_subfolder_and_code_that_comes_with_a_model(folder: str, tmp_path: Path) -> None:
    """The code runs with the flag alone; without it the command fails and says so, and asks nothing."""
    inner = tmp_path / "inner"
    inner.mkdir()
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
    code += "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
    code += "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    (inner / "own.py").write_text(code)
    config = json.loads(Path(folder, "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (inner / "config.json").write_text(json.dumps(config))
    command = ("plan", str(tmp_path), "--subfolder", "inner", "--tp", "2", "--json")
    refused = call(*command)
    assert refused.exit_code != 0 and "--trust-remote-code" in refused.stderr and "own.OwnConfig" in refused.stderr
    found = call(*command, "--trust-remote-code")
    assert found.exit_code == 0, found.output
    assert {layer["name"]: layer["axis"] for layer in json.loads(found.stdout)["layers"]}["lm_head"] == "column"
    absent = call("plan", str(tmp_path), "--subfolder", "outer")
    assert absent.exit_code != 0 and "--subfolder 'outer'" in absent.stderr
