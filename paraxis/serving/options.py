"""The options of a service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServeOptions:
    """What a service is like; the same on every rank.

    Attributes:
        model: A Hub id or a directory.
        name: What clients call the model.
        host, port: Where rank 0 listens.
        api_key: What clients must send; None for no key.
        max_batch: How many requests are computed at the same time.
        max_tokens: How many new tokens a request may ask for; None for what the KV cache and the model hold.
        max_queue: How many more requests may wait.
        step_tokens: How many tokens a step computes: longer prompts are computed in chunks.
        block_size: Positions of a block of the KV cache.
        memory: Bytes of the KV cache of each rank; None for a share of what is free.
        timeout: Seconds after which a request is cancelled.
        drain: Seconds that running requests have to end after SIGTERM.
        max_body: Bytes of the body of a request.
        prefix_sharing: Whether requests share the KV cache of a common prefix.
        log_prompts: Whether prompts are logged.
        dtype: Of the weights.
        hub: Revision, subfolder, variant and trust in code that comes with the model.
        load: Further options of ``parallelize_model``.
    """

    model: str
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_batch: int = 64
    max_tokens: int | None = None
    max_queue: int = 256
    step_tokens: int = 1024
    block_size: int = 32
    memory: int | None = None
    timeout: float = 600.0
    drain: float = 30.0
    max_body: int = 4 * 2**20
    prefix_sharing: bool = True
    log_prompts: bool = False
    dtype: str = "auto"
    hub: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Without the key: options end up in logs and tracebacks."""
        return f"ServeOptions(model={self.model!r}, host={self.host!r}, port={self.port})"
