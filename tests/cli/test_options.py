"""Options that several commands have: what becomes of them, and which values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paraxis.cli._errors import UsageError
from paraxis.cli._options import check_dtype, check_machine, check_model, planning_options


def test_planning_options_are_arguments_of_plan_model() -> None:
    found = planning_options("h100", "decode", ["*.down=row", "head=not column", "head=sharded"], 1.5)
    assert found == {
        "machine": "h100",
        "objective": "decode",
        "constraints": {"*.down": ["row"], "head": ["not column", "sharded"]},
        "memory_limit": 1_500_000_000,
    }
    assert planning_options(None, None, None, None) == {"machine": None, "objective": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, "fun", None, None), "unknown --objective 'fun': use one of prefill, decode, training"),
        ((None, None, ["lm_head"], None), "--constraint 'lm_head' is not NAME=PLACEMENT"),
        ((None, None, ["=row"], None), "is not NAME=PLACEMENT"),
        ((None, None, None, float("nan")), "--memory-limit nan"),
        (("abacus", None, None, None), "--machine 'abacus' is neither a preset"),
    ],
)
def test_bad_planning_options_are_refused(options: tuple[str | None, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planning_options(*options)  # type: ignore[arg-type]


def test_machines_are_presets_or_files(tmp_path: Path) -> None:
    check_machine("cpu")
    (tmp_path / "machine.json").write_text("{")
    with pytest.raises(ValueError, match="does not describe a machine"):
        check_machine(str(tmp_path / "machine.json"))


def test_models_are_names_or_directories_with_a_config(tmp_path: Path) -> None:
    check_model("org/model")
    with pytest.raises(ValueError, match="has no config.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        check_model(str(tmp_path / "config.json"))
    with pytest.raises(UsageError, match="the model name is empty"):
        check_model(" ")


def test_dtypes_are_floating_point() -> None:
    for dtype in ("auto", "bfloat16", "torch.float32"):
        check_dtype(dtype)
    for dtype in ("int8", "float99", "nn"):
        with pytest.raises(UsageError, match="is no floating-point dtype"):
            check_dtype(dtype)
