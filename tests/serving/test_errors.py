"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from paraxis.serving.errors import ApiError, invalid


def test_errors_have_a_kind_and_headers() -> None:
    busy = ApiError(429, "full", code="queue_full", retry_after=3)
    assert busy.headers() == {"Retry-After": "3"} and busy.kind == "rate_limit_error"
    assert ApiError(401, "no key").headers() == {"WWW-Authenticate": "Bearer"}
    assert ApiError(503, "ends").kind == "server_error"
    wrong = invalid("n", "must be an integer")
    assert wrong.status == 400 and wrong.body()["error"] == {
        "message": "n: must be an integer",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_value",
    }
