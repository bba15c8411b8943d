"""The package itself: public names are loaded when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paraxis


def test_import_does_not_import_torch() -> None:
    code = "import sys, paraxis; paraxis.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_is_there() -> None:
    assert len(paraxis.__all__) > 20 and set(paraxis.__all__) <= set(dir(paraxis))
    for name in paraxis.__all__:
        assert getattr(paraxis, name) is not None, name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'parallelise_model'"):
        _ = paraxis.parallelise_model  # type: ignore[attr-defined]


def test_garbage_is_not_collected_while_libraries_are_imported() -> None:
    """Millions of objects that stay: scanning them over and over takes a quarter of the time."""
    code = (
        "import gc, paraxis; found = []; gc.callbacks.append(lambda phase, _: found.append(phase)); "
        "paraxis.parallelize_model; print(len(found), gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    collections, enabled = done.stdout.split()
    assert int(collections) <= 4 and enabled == "True"
