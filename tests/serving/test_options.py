"""The options of a service."""

from __future__ import annotations

from paraxis.serving.options import ServeOptions


def test_the_key_is_not_shown() -> None:
    options = ServeOptions("org/model", "model", api_key="secret")
    assert options.host == "127.0.0.1" and "secret" not in repr(options) and "secret" not in f"{options}"
