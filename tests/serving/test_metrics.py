"""Prometheus' text format."""

from __future__ import annotations

from paraxis.serving.metrics import Histogram, Metrics


def test_histograms_are_cumulative() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="1.0"} 2',
        'x_bucket{le="2.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 12.000000",
        "x_count 4",
    ]


def test_the_page_has_requests_and_values() -> None:
    metrics = Metrics()
    metrics.ended("/v1/completions", 200, 0.3)
    metrics.ended("/v1/completions", 200, 0.3)
    metrics.token(0.1, True)
    page = metrics.render({"paraxis_requests_running": ("Now.", 3)}, {"paraxis_steps_total": ("Steps.", 7)})
    assert 'paraxis_requests_total{path="/v1/completions",status="200"} 2' in page
    assert "# TYPE paraxis_requests_running gauge\nparaxis_requests_running 3\n" in page
    assert "# TYPE paraxis_steps_total counter\nparaxis_steps_total 7\n" in page
    assert "paraxis_time_to_first_token_seconds_count 1" in page
