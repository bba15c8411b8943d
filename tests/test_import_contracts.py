"""Imports go down the layers, the core is pure, and no import inside a function hides a cycle.

The contracts are in pyproject.toml and run in ``make lint``. What import-linter cannot say is tested here: that the
core does not reach ``torch.distributed``, a submodule of another package, and which imports may be inside functions.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = ("paraxis.placement", "paraxis.rules", "paraxis.solver")

INSIDE_FUNCTIONS = {
    ("paraxis.cli*", "paraxis*"): "lazy: `paraxis --help` loads no torch",
    ("paraxis.rules.registration", "paraxis.rules.validation.check"): "lazy: only for rules that a user registers",
    ("paraxis.optimize.decode_kernels*", "paraxis.kernels.triton"): "optional dependency: triton",
    ("paraxis.plan.plan", "paraxis.utils.tables"): "lazy: only where a plan is printed is rich needed",
    ("paraxis.tensor.quantized", "paraxis.kernels.triton"): "optional dependency: triton",
    ("paraxis.runtime.batching.device_step", "paraxis.kernels.triton"): "optional dependency: triton",
    ("paraxis.serving.rank", "paraxis.serving.*"): "optional dependency: fastapi, which rank 0 alone needs",
    ("paraxis.kernels.triton.rope_kv_write", "*.rope_kv_write_kernel"): "optional dependency: triton",
}  # fmt: skip
"""(importing module, imported module), both patterns: why the import is inside a function."""


class Import(NamedTuple):
    """An import statement: the module that has it, what it imports, and whether it is inside a function."""

    module: str
    imported: str
    names: tuple[str, ...]
    inside_function: bool

    @property
    def modules(self) -> tuple[str, ...]:
        """What is imported: the module, and its names, which may be modules."""
        return (self.imported, *(f"{self.imported}.{name}" for name in self.names))


class Source:
    """The modules of a copy of the package, and their import statements."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        for path in sorted((folder / "paraxis").rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def imports(self, module: str) -> list[Import]:
        """The import statements of a module, without those for annotations alone."""
        path = self.files[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        return list(_imports(ast.parse(path.read_text(encoding="utf-8")), module, package, False))

    def reachable(self, packages: tuple[str, ...]) -> set[str]:
        """The modules of the project that importing these packages may load, also later and inside functions."""
        found: set[str] = set()
        waiting = [m for m in self.files if m.startswith(packages)]
        while waiting:
            module = waiting.pop()
            if module in found:
                continue
            found.add(module)
            parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
            waiting += [m for m in parents if m in self.files]
            waiting += [m for item in self.imports(module) for m in item.modules if m in self.files]
        return found


def _imports(node: ast.AST, module: str, package: str, inside: bool) -> Iterator[Import]:
    """The import statements below a node of the syntax tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _imports(other, module, package, inside)
        elif isinstance(child, ast.Import):
            yield from (Import(module, alias.name, (), inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - child.level + 1]) if child.level else ""
            imported = ".".join(filter(None, (above, child.module)))
            yield Import(module, imported, tuple(alias.name for alias in child.names), inside)
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, module, package, inside or function)


def reaches_torch_distributed(source: Source) -> list[str]:
    """What the pure packages import, directly or through others, of ``torch.distributed``."""
    found = []
    for module in sorted(source.reachable(PURE)):
        for item in source.imports(module):
            if any(f"{name}.".startswith("torch.distributed.") for name in item.modules):
                found.append(f"{module} imports {item.imported}")
        text = source.files[module].read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                found.append(f"{module}:{node.lineno} uses torch.distributed")
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, for violating them."""
    shutil.copytree(ROOT / "paraxis", tmp_path / "paraxis", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add_import(folder: Path, file: str, statement: str) -> None:
    path = folder / "paraxis" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{statement}\n", encoding="utf-8")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


# -- the project ---------------------------------------------------------------------------------------------------


def test_the_contracts_hold() -> None:
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout


def test_the_core_does_not_reach_torch_distributed() -> None:
    assert reaches_torch_distributed(Source(ROOT)) == []


def test_imports_inside_functions_have_a_reason() -> None:
    source = Source(ROOT)
    used = set()
    for module in source.files:
        for item in source.imports(module):
            if not item.inside_function or not item.imported.startswith("paraxis"):
                continue
            reasons = {
                key for key in INSIDE_FUNCTIONS
                if fnmatchcase(module, key[0]) and any(fnmatchcase(m, key[1]) for m in item.modules)
            }  # fmt: skip
            assert reasons, f"{module} imports {item.imported} inside a function: why?"
            used |= reasons
    assert used == set(INSIDE_FUNCTIONS), f"not needed any more: {set(INSIDE_FUNCTIONS) - used}"


# -- that violations are found -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "statement", "contract"),
    [
        ("rules/matmul.py", "from ..distributed import collectives", "placement, rules and solver are pure"),
        ("placement/layout.py", "def f():\n    from ..rules import base", "imports go down the layers"),
        ("weights/load.py", "from ..runtime import guards", "imports go down the layers"),
        ("rules/base.py", "from . import registry", "no cycles, between packages or inside of one"),
        ("rules/table.py", "from .validation import check", "rules do not depend on their validation"),
    ],
)
def test_a_violation_breaks_the_contract(copy: Path, file: str, statement: str, contract: str) -> None:
    add_import(copy, file, statement)
    found = lint_imports(copy)
    broken = [line for line in found.stdout.splitlines() if line.endswith("BROKEN")]
    assert found.returncode == 1 and any(line.startswith(contract) for line in broken), found.stdout


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("rules/matmul.py", "import torch.distributed as dist"),
        ("placement/layout.py", "from torch import distributed"),
        ("errors.py", "from torch.distributed.tensor import DTensor"),
        ("solver/cost.py", "def world():\n    return torch.distributed.get_world_size()"),
        ("graph/mutation.py", "def f():\n    from ..compat import distributed"),
    ],
)
def test_reaching_torch_distributed_is_found(copy: Path, file: str, statement: str) -> None:
    add_import(copy, file, statement)
    assert reaches_torch_distributed(Source(copy))


def test_imports_for_annotations_are_left_out(copy: Path) -> None:
    add_import(
        copy, "rules/matmul.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed"
    )
    assert reaches_torch_distributed(Source(copy)) == []
