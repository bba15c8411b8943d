"""Reading fields: wrong values are refused with their name."""

from __future__ import annotations

from typing import Any

import pytest

from paraxis.serving.errors import ApiError
from paraxis.serving.fields import Fields


def test_values_are_taken_once_and_the_rest_is_refused() -> None:
    fields = Fields({"a": 1, "b": None, "c": 2.5, "d": True, "e": "x", "f": [1]})
    assert "a" in fields and "b" not in fields
    assert fields.integer("a", None, 0, 9) == 1 and fields.integer("b", 7, 0, 9) == 7
    assert fields.number("c", 0, 0, 3) == 2.5 and fields.flag("d") and fields.texts("e", 2) == ("x",)
    with pytest.raises(ApiError, match="unknown field: f"):
        fields.finish()
    fields.ignore("f")
    fields.finish()


@pytest.mark.parametrize(
    ("value", "read", "message"),
    [
        (True, lambda f: f.integer("x", None, 0, 9), "must be an integer"),
        (10, lambda f: f.integer("x", None, 0, 9), "is not between 0 and 9"),
        ("1", lambda f: f.number("x", 0, 0, 9), "must be a number"),
        (float("nan"), lambda f: f.number("x", 0, 0, 9), "must be a number"),
        (float("inf"), lambda f: f.number("x", 0, 0, 9), "is not between 0 and 9"),
        (10**999, lambda f: f.number("x", 0, 0, 9), "is not between 0 and 9"),
        (10**999, lambda f: f.integer("x", None, 0, 9), "is not between 0 and 9"),
        (1, lambda f: f.flag("x"), "must be true or false"),
        (["a", ""], lambda f: f.texts("x", 4), "none of them empty"),
        (["a", "b"], lambda f: f.texts("x", 1), "at most 1"),
        ("z", lambda f: f.refuse("x", ("a",), "not here"), "not here"),
    ],
)
def test_wrong_values_are_refused(value: Any, read: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read(Fields({"x": value}))
    assert caught.value.status == 400 and caught.value.param == "x"


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(ApiError, match="JSON object"):
        Fields([1])
