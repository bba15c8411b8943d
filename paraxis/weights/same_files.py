"""Checking that all ranks see the same checkpoint, without reading all of it.

Ranks on several machines may use different revisions, or different downloads. Compared are the configuration, and of
every file its size, its header and samples spread over its weights: another revision differs nearly everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from ..distributed.consensus import all_gather_object
from ..errors import CheckpointError

SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many samples of a file are compared, and how long each is."""


def fingerprint(path: str | Path) -> str:
    """A digest of a file's size and of samples from its beginning to its end."""
    size = os.path.getsize(path)
    digest = hashlib.blake2b(str(size).encode(), digest_size=12)
    with open(path, "rb") as file:
        for k in range(SAMPLES + 1):
            file.seek(max(size - SAMPLE_BYTES, 0) * k // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_same_files(folder: Path, files: Iterable[str], group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks unless all see the same files. A collective."""
    mine = {Path(file).name: fingerprint(file) for file in sorted({str(folder / "config.json"), *files})}
    answers = all_gather_object(group, mine, f"comparing the files of {str(folder)!r}")
    for rank, theirs in enumerate(answers):
        names = {**answers[0], **theirs}
        differing = [name for name in names if theirs.get(name) != answers[0].get(name)]
        if differing:
            verb = "is" if len(differing) == 1 else "are"
            raise CheckpointError(
                f"the ranks see different checkpoints: {', '.join(differing[:4])} of rank {rank} "
                f"{verb} not what rank 0 has. Use the same directory on all of them, or the same revision "
                "(a commit hash), and remove incomplete downloads."
            )
