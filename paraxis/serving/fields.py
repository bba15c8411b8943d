"""Reading the fields of a request's JSON: every value is checked, and what is not known is refused."""

from __future__ import annotations

from typing import Any

from .errors import ApiError, invalid


class Fields:
    """The JSON object of a request. Fields are taken out one by one; :meth:`finish` refuses what is left over."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object")
        self._data = dict(data)

    def take(self, name: str, default: Any = None) -> Any:
        """Any value; null is the default."""
        value = self._data.pop(name, None)
        return default if value is None else value

    def __contains__(self, name: str) -> bool:
        """Whether the client has set the field."""
        return self._data.get(name) is not None

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number between two others."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise invalid(name, "must be a number")
        if not low <= value <= high:  # before float(), which no integer of a thousand digits fits in
            raise invalid(name, f"is not between {low:g} and {high:g}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """An integer between two others, or the default."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(name, "must be an integer")
        if not low <= value <= high:
            raise invalid(name, f"is not between {low} and {high}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(name, "must be true or false")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text, or a list of texts."""
        value = self.take(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(x, str) and x for x in found):
            raise invalid(name, "must be a text, or a list of texts, none of them empty")
        if len(found) > most:
            raise invalid(name, f"has {len(found)} texts, and at most {most} are allowed")
        return tuple(found)

    def refuse(self, name: str, only: tuple[Any, ...], why: str) -> None:
        """A field of which this service knows these values alone."""
        value = self.take(name)
        if value is not None and value not in only:
            raise ApiError(400, f"{name}: {why}", name, "unsupported_value")

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here."""
        for name in names:
            self._data.pop(name, None)

    def finish(self) -> None:
        """Raise if there are fields that nobody has taken."""
        left = sorted(name for name, value in self._data.items() if value is not None)
        if left:
            raise ApiError(400, f"unknown field: {', '.join(map(str, left))}", str(left[0]), "unknown_parameter")
