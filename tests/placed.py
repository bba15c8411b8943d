"""Former names of helpers.shards, until all tests use the new ones."""

from __future__ import annotations

from helpers.shards import local_shard as cut
from helpers.shards import pad_to_full as spread
from helpers.shards import run_all as each
from helpers.shards import sharded_parameter as placed
from helpers.shards import sum_shards as assemble
from models.compare import context as world_ctx

__all__ = ["assemble", "cut", "each", "placed", "spread", "world_ctx"]
