"""``python -m paraxis.rules.validation``: validate all rules of this package on sample calls, and print a table."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import rule_for
from .check import Report, check
from .exploration import missing
from .samples import FAMILIES


@dataclass
class Row:
    """The results for one operator."""

    operator: str
    calls: int = 0
    validated: int = 0
    """Strategies with a sharded tensor that were run, on 2, 3 and 4 ranks."""
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Sound strategies that the rule does not have, each with the call it was found on."""


def survey(operators: Sequence[str] = ()) -> list[Row]:
    """Validate all rules, or those of operators whose names contain one of these, on their sample calls."""
    rows: dict[Any, Row] = {}
    torch.manual_seed(0)
    for family in FAMILIES.values():
        for target, args, kwargs in family():
            if operators and not any(name in str(target) for name in operators):
                continue
            if rule_for(target) is None:
                continue
            row = rows.setdefault(target, Row(str(target)))
            report: Report = check(target, *args, skip_kinds=("vocab",), **kwargs)
            row.calls += 1
            row.validated += report.sharded
            row.wrong += report.wrong
            shapes = ", ".join("×".join(map(str, x.shape)) for x in args if isinstance(x, torch.Tensor))
            row.missing += [f"{line} ({shapes})" for line in missing(target, *args, **kwargs)]
    return [rows[target] for target in sorted(rows, key=str)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results; the exit code is 1 if a rule is wrong, 2 if a name matches no rule."""
    parser = argparse.ArgumentParser(prog="python -m paraxis.rules.validation", description=__doc__)
    parser.add_argument("operators", nargs="*", help="parts of operator names, such as aten.softmax (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        rows = survey(options.operators)
    if unknown := [name for name in options.operators if not any(name in row.operator for row in rows)]:
        parser.error(
            f"no operator with a rule and sample calls has a name that contains {', '.join(unknown)}: "
            f"add a rule, or calls of its family in paraxis/rules/validation/samples.py"
        )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _print(rows)
    return 1 if any(row.wrong for row in rows) else 0


def _print(rows: Sequence[Row]) -> None:
    table = Table("operator", title=f"{len(rows)} operators on 2, 3 and 4 ranks")
    for name in ("calls", "strategies", "wrong"):
        table.add_column(name, justify="right")
    table.add_column("sound but missing")
    for row in rows:
        shown = [*row.missing[:2], *([f"and {len(row.missing) - 2} more"] if len(row.missing) > 2 else [])]
        table.add_row(row.operator, str(row.calls), str(row.validated), str(len(row.wrong)), "\n".join(shown))
    console = Console()
    console.print(table)
    for row in rows:
        for problem in row.wrong[:3]:
            console.print(f"wrong: {problem}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
