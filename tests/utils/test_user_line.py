"""Warnings point at the line of the user, not at ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from paraxis.utils.user_line import warn_user


def caught(call: Callable[[], None]) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    (warning,) = found
    return warning


def test_warnings_name_the_line_that_calls_a_library() -> None:
    library = nn.__file__.replace("__init__.py", "modules/elsewhere.py")
    forward = compile("def forward(x):\n    warn_user('gathered')\n    return x", library, "exec")
    namespace: dict[str, object] = {"warn_user": warn_user}
    exec(forward, namespace)
    module = nn.Identity()
    module.forward = namespace["forward"]  # type: ignore[assignment]

    def user() -> None:
        module(torch.ones(1))

    warning = caught(user)
    assert warning.filename == __file__ and str(warning.message) == "gathered"
    assert warning.lineno == user.__code__.co_firstlineno + 1
