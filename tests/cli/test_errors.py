"""Bad input: one paragraph on stderr and the right exit code."""

from __future__ import annotations

import json

import pytest
from cli.helpers import call
from typer import Exit
from typer.testing import CliRunner

from paraxis.cli import app
from paraxis.cli._errors import MAX_MESSAGE, report_errors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
}
CONFIGS = {
    "good": json.dumps(LLAMA),
    "broken": "{not json",
    "list": "[]",
    "binary": "\udcff\udcfe\x00",
    "unknown": json.dumps({**LLAMA, "model_type": "abacus"}),
    "untyped": json.dumps({k: v for k, v in LLAMA.items() if k != "model_type"}),
    "unnamed": json.dumps({k: v for k, v in LLAMA.items() if k != "architectures"}),
    "strange": json.dumps({**LLAMA, "architectures": ["NoSuchModel"]}),
    "negative": json.dumps({**LLAMA, "hidden_size": -4}),
    "textual": json.dumps({**LLAMA, "hidden_size": "big"}),
    "odd": json.dumps({**LLAMA, "hidden_size": 33}),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories and files that are no models, plans or machines, by name."""
    root = tmp_path_factory.mktemp("places")
    for name, text in CONFIGS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    for name, text in (("cut", "{"), ("listed", "[]"), ("half", '{"world_size": 2}')):
        (root / f"{name}.json").write_text(text)
    return {"root": str(root), **{path.name: str(path) for path in root.iterdir()}}


FAILURES = [
    # models
    (["plan", "/no/such/directory"], 1, "the directory '/no/such/directory' does not exist"),
    (["plan", "no-one/has-this-model"], 1, "no-one/has-this-model"),
    (["plan", "{file}"], 1, "is a file: give the directory with its config.json"),
    (["plan", "{empty}"], 1, "has no config.json"),
    (["plan", "{broken}"], 1, "config.json"),
    (["plan", "{list}"], 1, "config.json"),
    (["plan", "{binary}"], 1, "config.json"),
    (["plan", "{unknown}"], 1, "abacus"),
    (["plan", "{untyped}"], 1, "model_type"),
    (["plan", "{unnamed}"], 1, "does not say which class the model is"),
    (["plan", "{strange}"], 1, "names the class 'NoSuchModel'"),
    (["plan", "{negative}"], 1, ""),
    (["plan", "{textual}"], 1, "config.json"),
    (["plan", "{odd}"], 1, ""),
    (["plan", ""], 2, "the model name is empty"),
    (["explain", "{broken}", "lm_head"], 1, "config.json"),
    (["code", "{unknown}"], 1, "abacus"),
    (["verify", "{broken}"], 1, "config.json"),
    (["verify", "{unknown}"], 1, "abacus"),
    (["generate", "{empty}", "-p", "x"], 1, "has no config.json"),
    (["generate", "{good}", "-p", "x"], 1, "tokenizer"),
    (["bench", "{broken}"], 1, "config.json"),
    (["bench", "{file}"], 1, "is a file"),
    # names of parameters and machines, constraints
    (["explain", "{good}", "lm_haed"], 1, "the plan has no parameter, module or node 'lm_haed'"),
    (["plan", "{good}", "-c", "lm_haed=row"], 1, "Did you mean 'lm_head'"),
    (["plan", "{good}", "-c", "lm_head=sideways"], 1, "sideways"),
    (["plan", "{good}", "-c", "lm_head"], 2, "is not NAME=PLACEMENT"),
    (["plan", "{good}", "--machine", "abacus"], 2, "is neither a preset"),
    (["plan", "{good}", "--machine", "{cut.json}"], 1, "does not describe a machine"),
    (["plan", "{good}", "--machine", "{half.json}"], 1, "does not describe a machine"),
    (["plan", "{good}", "--machine", "{empty}"], 1, "is neither a preset"),
    (["plan", "{good}", "--objective", "fun"], 2, "unknown --objective 'fun'"),
    (["plan", "{good}", "--memory-limit", "nan"], 2, "--memory-limit nan"),
    (["plan", "{good}", "--memory-limit", "-1"], 2, "--memory-limit -1"),
    (["plan", "{good}", "--memory-limit", "0.000001"], 1, "memory_limit=1000 (1000 bytes) cannot hold"),
    # numbers of ranks, GPUs, sizes
    (["plan", "{good}", "--tp", "auto"], 2, "--tp auto needs --gpu"),
    (["plan", "{good}", "--tp", "auto", "--gpu", "abacus"], 2, "Add its memory, as in 'abacus-80GB'"),
    (["plan", "{good}", "--gpu", "abacus"], 2, "unknown GPU: --gpu 'abacus'"),
    (["plan", "{good}", "--tp", "auto", "--gpu", "0GB"], 2, "a GPU needs memory"),
    (["plan", "{good}", "--tp", "auto", "--gpu", "nanGB"], 2, "Add its memory"),
    (["plan", "{good}", "--tp", "auto", "--gpu=-5GB"], 2, "Add its memory"),
    (["code", "{good}", "--rank", "2"], 2, "the last of 2 ranks is 1"),
    (["verify", "{good}", "--tp", "4000"], 2, "too many processes for this machine"),
    (["demo", "--tp", "4000"], 2, "too many processes for this machine"),
    (["calibrate", "--tp", "4000", "--out", "{root}/machine.json"], 2, "too many processes for this machine"),
    (["generate", "{good}", "-p", ""], 2, "the prompt is empty"),
    (["generate", "{good}", "-p", "x", "--dtype", "float99"], 2, "--dtype 'float99'"),
    (["bench", "{good}", "--dtype", "int8"], 2, "--dtype 'int8'"),
    (["verify", "{good}", "--dtype", "int8"], 2, "--dtype 'int8' is none of float32, bfloat16, float16"),
    (["verify", "{good}", "--device", "tpu"], 2, "--device 'tpu' is none of cpu, cuda and auto"),
    (["verify", "{good}", "--report", "{root}/report.txt"], 2, "name it .json or .md"),
    (["bench", "{good}", "--report", "{root}/none/report.md"], 1, "does not exist"),
    # files to read and to write; nobody may write into /proc, not even root
    (["diff", "{root}/none.json", "{half.json}"], 1, "none.json: No such file"),
    (["diff", "{cut.json}", "{half.json}"], 1, "is not a plan: write one with"),
    (["diff", "{listed.json}", "{listed.json}"], 1, "is not a plan: write one with"),
    (["diff", "{half.json}", "{half.json}"], 1, "is not a plan: write one with"),
    (["diff", "{empty}", "{half.json}"], 1, "Is a directory"),
    (["plan", "{good}", "--save", "{root}/none/plan.json"], 1, "does not exist"),
    (["plan", "{good}", "--save", "{empty}"], 1, "is a directory: give a file name"),
    (["plan", "{good}", "--save", "/proc/plan.json"], 1, "cannot be written"),
    (["plan", "{good}", "--html", "{root}/none/plan.html"], 1, "does not exist"),
    (["plan", "{good}", "--html", "/proc/plan.html"], 1, "cannot be written"),
    (["calibrate", "--out", "{root}/none/machine.json"], 1, "does not exist"),
    (["calibrate", "--out", "{empty}"], 1, "is a directory"),
]


@pytest.mark.parametrize(("args", "code", "text"), FAILURES, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_one_paragraph(args: list[str], code: int, text: str, places: dict[str, str]) -> None:
    """The problem and what to do, without a traceback; exit code 1 for a failure, 2 for wrong usage."""
    found = call(*(arg if "{" not in arg else _filled(arg, places) for arg in args))
    assert found.exit_code == code, found.stderr
    assert text in found.stderr and found.stderr.startswith("paraxis: ")
    assert len(found.stderr.strip().splitlines()) == 1 and len(found.stderr) < 1500
    assert not found.stdout


def _filled(text: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", place)
    return text


WRONG = [
    *([*command, "--tp", number] for command in (["plan", "x"], ["verify", "x"], ["demo"]) for number in ("0", "two")),
    *(["plan", "x", "--tp", number] for number in ("-1", "2.5", "", "99999")),
    *(["explain", "x", "y", "--tp", "0"], ["code", "x", "--tp", "-1"], ["generate", "x", "--tp", "0"]),
    *(["bench", "x", "--tp", "0"], ["calibrate", "--tp", "1"], ["code", "x", "--rank", "-1"]),
    *(["plan", "x", "--batch", "0"], ["plan", "x", "--context", "-1"], ["plan", "x", "--context", "nan"]),
    *(["generate", "x", "-p", "x", "--temperature", "0"], ["generate", "x", "-p", "x", "--temperature", "hot"]),
    *(["bench", "x", "--input-len", "0"], ["bench", "x", "--prompt", "0"], ["bench", "x", "--batch", "0"]),
    *(["verify", "x", "--layers", "0"], ["generate", "x", "--max-new-tokens", "0"]),
    *(["plan"], ["diff", "x"], ["explain", "x"], ["plan", "x", "--unheard-of"], ["unheard-of"]),
]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_options_out_of_range(args: list[str]) -> None:
    """They are refused first of all, and the usage is shown."""
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2 and "Error" in found.stderr and "--help" in found.stderr
    assert "Traceback" not in found.stderr and not found.stdout


def test_debug_raises_the_error(places: dict[str, str]) -> None:
    found = call("plan", places["broken"], "--debug")
    assert found.exit_code == 1 and type(found.exception).__name__ == "CheckpointError"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("x" * 5000), f"{'x' * MAX_MESSAGE} ... (use --debug to see all of it)"),
        (ValueError(), "ValueError without a message (use --debug to see where)"),
        (KeyError("a\nb"), r"KeyError: 'a\nb'"),
    ],
)
def test_messages_are_short_and_never_empty(error: Exception, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit), report_errors(debug=False):
        raise error
    assert capsys.readouterr().err == f"paraxis: {text}\n"
