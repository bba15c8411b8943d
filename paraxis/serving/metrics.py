"""What a service counts, in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)


class Histogram:
    """How many values are not larger than each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Another value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterable[str]:
        """Its lines in Prometheus' format."""
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters and histograms of a service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: dict[tuple[str, int], int] = {}
        self.first_token = Histogram(SECONDS)
        self.between_tokens = Histogram(SHORT)
        self.duration = Histogram(SECONDS)
        self.queued = Histogram(SECONDS)

    def ended(self, path: str, status: int, seconds: float) -> None:
        """A request has ended with this status."""
        with self._lock:
            self.requests[path, status] = self.requests.get((path, status), 0) + 1
            self.duration.add(seconds)

    def token(self, since: float, first: bool) -> None:
        """A token, so many seconds after the one before it, or after the request."""
        with self._lock:
            (self.first_token if first else self.between_tokens).add(since)

    def render(self, gauges: dict[str, tuple[str, float]], counters: dict[str, tuple[str, float]]) -> str:
        """The page; the arguments are (help, value) by name."""
        with self._lock:
            lines = _header("paraxis_requests_total", "counter", "Requests by path and status.")
            for (path, status), count in sorted(self.requests.items()):
                lines.append(f'paraxis_requests_total{{path="{path}",status="{status}"}} {count}')
            for kind, values in (("gauge", gauges), ("counter", counters)):
                for name, (text, value) in values.items():
                    lines += [*_header(name, kind, text), f"{name} {value:g}"]
            for name, text, histogram in (
                ("paraxis_time_to_first_token_seconds", "From the request to its first token.", self.first_token),
                ("paraxis_inter_token_seconds", "Between two tokens of a request.", self.between_tokens),
                ("paraxis_request_seconds", "From a request to the end of its answer.", self.duration),
                ("paraxis_queue_seconds", "From a request to its first step.", self.queued),
            ):
                lines += [*_header(name, "histogram", text), *histogram.lines(name)]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
