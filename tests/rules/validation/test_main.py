"""The command ``python -m paraxis.rules.validation``."""

from __future__ import annotations

import pytest
import torch

from paraxis.rules import temporary_rules
from paraxis.rules.registry import add, registered
from paraxis.rules.validation.__main__ import main, survey

aten = torch.ops.aten


def test_command_fails_for_a_wrong_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten.native_group_norm", "aten.cumsum"]) == 0
    assert "aten.cumsum.default" in capsys.readouterr().out
    with temporary_rules():
        add([aten.cumsum.default], registered()[aten.relu.default])
        assert main(["aten.cumsum", "--json"]) == 1
    assert '"operator": "aten.cumsum.default"' in capsys.readouterr().out


def test_command_fails_for_an_operator_without_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["aten.cumsum", "aten.masked_scatter"])
    assert stopped.value.code == 2
    assert "no operator with a rule and sample calls" in (said := capsys.readouterr().err)
    assert "contains aten.masked_scatter: add a rule" in " ".join(said.split())


def test_survey_counts_calls_and_strategies() -> None:
    (row,) = survey(["aten.cumsum"])
    assert row.operator == "aten.cumsum.default" and row.calls == 1 and row.validated > 3 and not row.wrong
