"""Whether all ranks see the same checkpoint, without reading it whole.

Ranks on several machines may have been given different revisions, or a download that is not the one of the others.
Compared are the configuration, and of every file its size, its header and samples spread over its weights: another
revision differs nearly everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from ..distributed.consensus import all_gather_object
from ..errors import CheckpointError

SAMPLES, PIECE = 64, 4096


def fingerprint(path: str | Path) -> str:
    """The size of a file and what is at its beginning, its end and in between."""
    size = os.path.getsize(path)
    digest = hashlib.blake2b(str(size).encode(), digest_size=12)
    with open(path, "rb") as file:
        for k in range(SAMPLES + 1):
            file.seek(max(size - PIECE, 0) * k // SAMPLES)
            digest.update(file.read(PIECE))
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
                f"{verb} not what rank 0 has. Give all of them the same directory, or the same revision "
                "(a commit hash), and remove downloads that were cut off."
            )
