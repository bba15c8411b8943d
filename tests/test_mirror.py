"""tests/ mirrors paraxis/: every module has a test file of its name, and every test file a module.

``paraxis/plan/make.py`` is tested by ``tests/plan/test_make.py``; more of the same module may be in files whose names
begin alike, such as ``test_search_depth.py``. Tests across modules are in tests/models, tests/zoo and tests/examples.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "paraxis"

ELSEWHERE = {
    "cli/__init__.py": ("cli/test_help.py", "collects the commands, of which the help is tested"),
    "kernels/triton/rope_kv_write_kernel.py": (
        "kernels/triton/test_rope_kv_write.py",
        "the Triton side of rope_kv_write.py, in a file of its own since it imports triton",
    ),
    "rules/validation/__main__.py": ("rules/validation/test_main.py", "the command line of the validation"),
}
"""Modules whose tests have another name: the test file, and why."""

ACROSS = {
    "models": "full models, across modules",
    "zoo": "every architecture, across modules",
    "examples": "the scripts in examples/",
}
"""Folders of tests that mirror no package."""

OF_THE_PROJECT = {
    "test_contributing.py": "CONTRIBUTING.md",
    "test_docs.py": "documentation",
    "test_import_contracts.py": "which package may import which",
    "test_mirror.py": "this",
    "test_packaging.py": "wheel and sdist",
    "test_ranks.py": "the ranks that tests run on",
    "test_vocabulary.py": "words",
    "cli/test_help.py": "the help of every command",
    "compat/test_private_apis.py": "no private API outside of compat/",
    "kernels/triton/test_decode_step.py": "the GPU kernels of a decode step together",
    "rules/validation/test_main.py": "the command line of the validation",
    "weights/test_killed.py": "ranks that are killed while they load or save",
}
"""Test files that belong to no single module, and what they test."""


def modules() -> list[Path]:
    """The modules of the package, relative to it."""
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def defines_something(module: Path) -> bool:
    """Whether a module defines functions or classes, or only imports names from others."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) for node in ast.walk(tree))


def name_of(module: Path) -> str:
    """The name that the test file of a module has: that of the package for an ``__init__``."""
    if module.name == "__init__.py":
        return module.parent.name or "paraxis"
    return module.stem.lstrip("_")


def test_every_module_has_a_test_file() -> None:
    missing = []
    for module in modules():
        if str(module) in ELSEWHERE or (module.name == "__init__.py" and not defines_something(module)):
            continue
        expected = module.parent / f"test_{name_of(module)}.py"
        if not (TESTS / expected).is_file():
            missing.append(f"paraxis/{module}: no tests/{expected}")
    assert not missing, "\n".join(missing)


def test_every_test_file_has_a_module() -> None:
    names: dict[Path, set[str]] = {}
    for module in modules():
        names.setdefault(module.parent, set()).add(name_of(module))
    stray = []
    for path in sorted(TESTS.rglob("test_*.py")):
        test = path.relative_to(TESTS)
        if test.parts[0] in ACROSS or str(test) in OF_THE_PROJECT:
            continue
        name = test.stem.removeprefix("test_")
        known = names.get(test.parent, set())
        if name not in known and not any(name.startswith(f"{module}_") for module in known):
            stray.append(f"tests/{test}: no module paraxis/{test.parent / name}.py")
    assert not stray, "\n".join(stray)


def test_every_exception_is_needed() -> None:
    for module, (test, _) in ELSEWHERE.items():
        assert (PACKAGE / module).is_file() and (TESTS / test).is_file(), module
    for test in OF_THE_PROJECT:
        assert (TESTS / test).is_file(), test
    assert all((TESTS / folder).is_dir() and not (PACKAGE / folder).exists() for folder in ACROSS)


def test_names_of_test_functions_say_what_is_expected() -> None:
    """At least two words: ``test_compiled`` says what runs, not what must come of it."""
    short = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name.count("_") < 2:
                short.append(f"{path.relative_to(TESTS)}: {node.name}")
    assert not short, "\n".join(short)
