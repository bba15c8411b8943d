"""Errors that a client gets, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request is refused, or has failed.

    Args:
        status: The HTTP status.
        message: For the person who wrote the client.
        param: The field that is wrong.
        code: A word for programs.
        retry_after: Seconds after which it may be tried again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's word for errors with this status."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        found = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(param: str, message: str) -> ApiError:
    """A field of a request is wrong."""
    return ApiError(400, f"{param}: {message}", param, "invalid_value")
