"""What is installed is complete: an sdist, the wheel built from it, and a command run from that wheel.

``make package-test`` also installs the wheel and everything it needs into an empty environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import paraxis

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "paraxis")
"""What a build reads. It runs on a copy: setuptools leaves folders behind, and packs what it finds in them."""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of the working tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    return build("sdist", copy)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution, as package indexes expect."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    return build("wheel", unpacked)


def build(kind: str, folder: Path) -> Path:
    """Call the build backend named in pyproject.toml, without an isolated environment: nothing is downloaded."""
    out = folder / "dist"
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run([sys.executable, "-c", code], folder)
    (built,) = out.iterdir()
    return built


def run(command: list[str], folder: Path) -> str:
    """The output of a command that has to succeed. It sees nothing of the repository."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path) -> Path:
    """The Python of a new, empty virtual environment."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def install(python: Path, wheel: Path, *options: str) -> None:
    """Install a wheel with the pip of this environment into another one."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    run([*pip, *options, str(wheel)], wheel.parent)


def package_files() -> set[str]:
    """The files below paraxis/ that have to be in every distribution."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "paraxis").rglob("*") if path.is_file()}
    return {name for name in found if "__pycache__" not in name and not name.endswith((".pyc", ".so"))}


def test_distributions_hold_every_file(sdist: Path, wheel: Path) -> None:
    """Modules, the report's page, C++ sources and py.typed are in the sdist and in the wheel."""
    files = package_files()
    assert {Path(name).suffix for name in files} >= {".py", ".html", ".cpp", ".h", ".typed"}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert files <= packed
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert installed == files


def test_the_version_is_stated_once(wheel: Path) -> None:
    """The distribution, the module and the command have one version; only the module states it."""
    assert wheel.name.split("-")[1] == paraxis.__version__
    assert not re.search(r"^version = \"", (ROOT / "pyproject.toml").read_text(), re.M)
    command = Path(sys.executable).parent / "paraxis"
    assert run([str(command), "--version"], ROOT).split() == ["paraxis", paraxis.__version__]


def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """`paraxis demo` runs from the installed wheel, in an environment that knows the repository's tools but not it."""
    python = environment(tmp_path / "venv")
    install(python, wheel, "--no-deps", "--no-index")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # Added as a plain path, so that the .pth file there that leads to the repository is not read.
    (packages / "this-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run([str(python), "-c", "import paraxis; print(paraxis.__file__)"], elsewhere)
    assert where.startswith(str(packages))
    assert run([str(python.parent / "paraxis"), "--version"], elsewhere).split()[1] == paraxis.__version__
    run([str(python.parent / "paraxis"), "demo", "--tp", "2"], elsewhere)  # fails where it differs from one rank


@pytest.mark.skipif(not os.environ.get("PARAXIS_PACKAGE"), reason="installs torch and all others: make package-test")
def test_a_wheel_brings_what_it_needs(wheel: Path, tmp_path: Path) -> None:
    """The dependencies that the wheel declares are enough, in an environment that has nothing."""
    python = environment(tmp_path / "venv")
    install(python, wheel, "-c", str(ROOT / "constraints.txt"))
    run([str(python.parent / "paraxis"), "demo", "--tp", "2"], tmp_path)
