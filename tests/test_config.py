"""Options: bad values are refused, former names still work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paraxis import Config
from paraxis.api import split_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel": "zero"}, "unknown data_parallel='zero': use 'replicate' or 'shard'"),
        ({"objective": "fun"}, "unknown objective='fun': use one of prefill, decode, training"),
        ({"compile": "triton"}, "unknown compile='triton'"),
        ({"mode": "max-autotune"}, "needs compile='inductor'"),
    ],
)
def test_bad_values_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)  # type: ignore[arg-type]


def test_keep_plans_is_the_former_name_of_cache_plans() -> None:
    with pytest.warns(DeprecationWarning, match="keep_plans= is deprecated: use cache_plans="):
        config, others = split_config({"keep_plans": False, "trust": 1})
    assert config == Config(cache_plans=False) and others == {"trust": 1}
    with pytest.warns(DeprecationWarning, match="use cache_plans"):
        assert config.keep_plans is False


def test_replacing_an_option_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    assert not replace(Config(cache_plans=False), show_progress=False).cache_plans
    assert not recwarn.list
