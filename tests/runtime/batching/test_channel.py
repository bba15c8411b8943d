"""Messages from the first rank to the others, short and long ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paraxis.runtime.batching.channel import SHORT, Channel


def send_some(messages: list[Any]) -> list[Any]:
    """What this rank gets."""
    assert dist.group.WORLD is not None
    channel = Channel(dist.group.WORLD, 60.0)
    found = []
    for message in messages:
        if channel.is_first:
            channel.send(message)
        else:
            found.append(channel.receive())
    channel.close()
    return found


def test_all_ranks_get_every_message(ranks: Any) -> None:
    messages = [{"a": 1}, b"x" * (3 * SHORT), None, "short again"]
    first, second = ranks(2).run(send_some, messages)
    assert first == [] and second == messages
