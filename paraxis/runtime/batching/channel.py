"""What the rank that decides tells the others: one message per step."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHORT = 1 << 14
"""Bytes of a message that is sent at once; longer ones are sent in two parts."""
_HEAD = 8


class Channel:
    """Messages from the first rank of a group to all others, over the host. Its construction is a collective.

    Messages have a process group of their own: another thread may use that of the model. They are pickled, by
    processes that trust one another as much as the ranks of a model do.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.first, self.is_first, self.alone = ranks[0], dist.get_rank() == ranks[0], len(ranks) == 1
        self._group: Any = None
        if not self.alone:
            self._group = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout),
                backend="gloo",
                use_local_synchronization=len(ranks) < dist.get_world_size(),
            )

    def send(self, message: Any) -> None:
        """From the first rank."""
        if self.alone:
            return
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        text = len(body).to_bytes(_HEAD, "little") + body
        head = torch.zeros(SHORT, dtype=torch.uint8)
        first = text[:SHORT]
        head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        dist.broadcast(head, self.first, group=self._group)
        if len(text) > SHORT:
            dist.broadcast(torch.frombuffer(bytearray(text[SHORT:]), dtype=torch.uint8), self.first, group=self._group)

    def receive(self) -> Any:
        """On the other ranks: wait for the next message."""
        head = torch.empty(SHORT, dtype=torch.uint8)
        dist.broadcast(head, self.first, group=self._group)
        text = head.numpy().tobytes()
        missing = _HEAD + int.from_bytes(text[:_HEAD], "little") - SHORT
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.uint8)
            dist.broadcast(rest, self.first, group=self._group)
            text += rest.numpy().tobytes()
        return pickle.loads(text[_HEAD:])

    def close(self) -> None:
        """Give up the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
