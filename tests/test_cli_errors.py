"""What the commands say about bad input, and how they end: one paragraph, the right exit code, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from typer.testing import CliRunner

from paraxis.cli import COMMANDS, app
from paraxis.cli import _planning as options
from paraxis.config import OBJECTIVES
from paraxis.plan import CollectivePlan, Plan

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
    """Directories and files that are wrong, each in its way, by name."""
    root = tmp_path_factory.mktemp("places")
    for name, text in CONFIGS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    for name, text in (("cut", "{"), ("listed", "[]"), ("half", '{"world_size": 2}')):
        (root / f"{name}.json").write_text(text)
    return {"root": str(root), **{path.name: str(path) for path in root.iterdir()}}


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    torch._dynamo.reset()
    return result


FAILURES = [
    # models
    (["plan", "/no/such/directory"], 1, "there is no directory '/no/such/directory'"),
    (["plan", "no-one/has-this-model"], 1, "no-one/has-this-model"),
    (["plan", "{file}"], 1, "is a file; give the directory with its config.json"),
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
    (["plan", ""], 2, "the model has no name"),
    (["explain", "{broken}", "lm_head"], 1, "config.json"),
    (["code", "{unknown}"], 1, "abacus"),
    (["verify", "{broken}"], 1, "config.json"),
    (["verify", "{unknown}"], 1, "abacus"),
    (["generate", "{empty}", "-p", "x"], 1, "has no config.json"),
    (["generate", "{good}", "-p", "x"], 1, "tokenizer"),
    (["bench", "{broken}"], 1, "config.json"),
    (["bench", "{file}"], 1, "is a file"),
    # names of parameters and machines, wishes
    (["explain", "{good}", "lm_haed"], 1, "is neither a parameter nor a module"),
    (["plan", "{good}", "-c", "lm_haed=row"], 1, "Did you mean 'lm_head'"),
    (["plan", "{good}", "-c", "lm_head=sideways"], 1, "sideways"),
    (["plan", "{good}", "-c", "lm_head"], 2, "is not of the form PATTERN=WISH"),
    (["plan", "{good}", "--machine", "abacus"], 2, "is neither a preset"),
    (["plan", "{good}", "--machine", "{cut.json}"], 1, "does not describe a machine"),
    (["plan", "{good}", "--machine", "{half.json}"], 1, "does not describe a machine"),
    (["plan", "{good}", "--machine", "{empty}"], 1, "is neither a preset"),
    (["plan", "{good}", "--objective", "fun"], 2, "--objective 'fun' is not known"),
    (["plan", "{good}", "--memory-limit", "nan"], 2, "--memory-limit nan"),
    (["plan", "{good}", "--memory-limit", "-1"], 2, "--memory-limit -1"),
    (["plan", "{good}", "--memory-limit", "0.000001"], 1, "memory_limit=1000 (1000 bytes) cannot hold"),
    # numbers of ranks, GPUs, sizes
    (["plan", "{good}", "--tp", "auto"], 2, "--tp auto needs --gpu"),
    (["plan", "{good}", "--tp", "auto", "--gpu", "abacus"], 2, "say its size, as in 'abacus-80GB'"),
    (["plan", "{good}", "--gpu", "abacus"], 2, "say its size, as in 'abacus-80GB'"),
    (["plan", "{good}", "--tp", "auto", "--gpu", "0GB"], 2, "has no memory"),
    (["plan", "{good}", "--tp", "auto", "--gpu", "nanGB"], 2, "say its size"),
    (["plan", "{good}", "--tp", "auto", "--gpu=-5GB"], 2, "say its size"),
    (["code", "{good}", "--rank", "2"], 2, "of 2 ranks the last is 1"),
    (["verify", "{good}", "--tp", "4000"], 2, "too many for this machine"),
    (["demo", "--tp", "4000"], 2, "too many for this machine"),
    (["calibrate", "--tp", "4000", "--out", "{root}/machine.json"], 2, "too many for this machine"),
    (["generate", "{good}", "-p", ""], 2, "there is no prompt"),
    (["generate", "{good}", "-p", "x", "--dtype", "float99"], 2, "--dtype 'float99'"),
    (["bench", "{good}", "--dtype", "int8"], 2, "--dtype 'int8'"),
    # files to read and to write; nobody may write into /proc, not even root
    (["diff", "{root}/none.json", "{half.json}"], 1, "none.json: No such file"),
    (["diff", "{cut.json}", "{half.json}"], 1, "is not a plan; write one with"),
    (["diff", "{listed.json}", "{listed.json}"], 1, "is not a plan; write one with"),
    (["diff", "{half.json}", "{half.json}"], 1, "is not a plan; write one with"),
    (["diff", "{empty}", "{half.json}"], 1, "Is a directory"),
    (["plan", "{good}", "--save", "{root}/none/plan.json"], 1, "there is no directory"),
    (["plan", "{good}", "--save", "{empty}"], 1, "is a directory: give the name of a file"),
    (["plan", "{good}", "--save", "/proc/plan.json"], 1, "cannot be written"),
    (["plan", "{good}", "--html", "{root}/none/plan.html"], 1, "there is no directory"),
    (["plan", "{good}", "--html", "/proc/plan.html"], 1, "cannot be written"),
    (["calibrate", "--out", "{root}/none/machine.json"], 1, "there is no directory"),
    (["calibrate", "--out", "{empty}"], 1, "is a directory"),
]


@pytest.mark.parametrize(("args", "code", "text"), FAILURES, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_one_paragraph(args: list[str], code: int, text: str, places: dict[str, str]) -> None:
    """What is wrong and what to do, without a traceback; 1 for what failed, 2 for what makes no sense."""
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
    *(["bench", "x", "--prompt", "0"], ["verify", "x", "--layers", "0"], ["generate", "x", "--max-new-tokens", "0"]),
    *(["plan"], ["diff", "x"], ["explain", "x"], ["plan", "x", "--unheard-of"], ["unheard-of"]),
]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_options_out_of_range(args: list[str]) -> None:
    """They are refused before anything is looked at, and the usage is shown."""
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2 and "Error" in found.stderr and "--help" in found.stderr
    assert "Traceback" not in found.stderr and not found.stdout


def test_the_traceback_is_for_those_who_ask(places: dict[str, str]) -> None:
    found = call("plan", places["broken"], "--debug")
    assert found.exit_code == 1 and type(found.exception).__name__ == "CheckpointError"


def test_help_has_examples_and_answers_at_once() -> None:
    """By the time that it computes, the best of three: other processes may be at work."""
    for name in COMMANDS:
        text = CliRunner().invoke(app, [name, "--help"]).output
        assert f"paraxis {name}" in text.partition("Example")[2], name
        assert "--debug" in text, name
    for name in ("plan", "explain", "diff", "verify", "bench", "doctor", "calibrate", "demo"):
        assert "--json" in CliRunner().invoke(app, [name, "--help"]).output, name
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([*PARAXIS, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < 0.5
    assert options.OBJECTIVES == OBJECTIVES


# -- signals and pipes -------------------------------------------------------------------------------------------

PARAXIS = [sys.executable, "-c", "from paraxis.cli import main; main()"]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    except OSError:
        pass
    return found


def is_rank(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended(args: list[str], number: signal.Signals, everybody: bool, temporary: Path, ranks: int = 2) -> tuple[int, str]:
    """Start a command, send a signal once its ranks are there, and see that nothing is left: (exit code, stderr)."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    started = subprocess.Popen(
        [*PARAXIS, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and started.poll() is None:
        if len([pid for pid in descendants(started.pid) if is_rank(pid)]) >= ranks and any(temporary.iterdir()):
            break
        time.sleep(0.05)
    below = descendants(started.pid)
    assert len(below) >= ranks
    (os.killpg if everybody else os.kill)(started.pid, number)
    _, text = started.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, below)), "ranks are left behind"
    assert not [path for path in temporary.iterdir() if path.name.startswith("paraxis-")], "files are left behind"
    return started.returncode, text


@pytest.mark.parametrize(("number", "text"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_command_with_ranks_is_ended(
    number: signal.Signals, text: str, places: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of a terminal, other signals the command alone."""
    code, said = ended(["verify", places["good"], "--tp", "2"], number, number == signal.SIGINT, tmp_path)
    assert code == 128 + number and said.strip() == f"paraxis: {text}"


@long
@pytest.mark.parametrize("args", [["demo"], ["bench", "{good}"], ["calibrate", "--out", "{root}/m.json"], ["doctor"]])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_commands_with_ranks_are_ended(
    args: list[str], number: signal.Signals, places: dict[str, str], tmp_path: Path
) -> None:
    code, text = ended([_filled(arg, places) for arg in args], number, number == signal.SIGINT, tmp_path)
    assert code == 128 + number and "Traceback" not in text
    assert text.strip().splitlines()[-1] == f"paraxis: {'interrupted' if number == 2 else 'ended by SIGTERM'}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_without_ranks_is_ended(number: signal.Signals) -> None:
    """In a process that needs no torch: the command waits for its prompt."""
    read = f"lambda: os.kill(os.getpid(), {int(number)})"
    code = f"import os, sys, types; sys.stdin = types.SimpleNamespace(read={read})"
    args = ["generate", "no/model"]
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; from paraxis.cli import main; main()", *args],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a job in the background may be deaf to it
    )
    assert found.returncode == 128 + number
    assert found.stderr == f"paraxis: {'interrupted' if number == 2 else 'ended by ' + number.name}\n"


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As with `| head -1`: quietly, with the exit code of other programs."""
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        Plan(2, seconds=seconds, collectives=[CollectivePlan("all_reduce", name, (2,), "float32")]).save(
            str(tmp_path / name)
        )
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(
        [*PARAXIS, "diff", str(tmp_path / "a"), str(tmp_path / "b")], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert found.returncode == 128 + signal.SIGPIPE and not found.stderr
