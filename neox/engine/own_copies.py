"""Checkpoints on disks that machines do not share: each machine checks the copy that it will read."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from neox.checkpoint import why_not_whole
from neox.engine.agreement import all_succeeded
from neox.errors import CheckpointError


def check_own_copy(path: Path, *, hashes: bool) -> None:
    """Check the checkpoint that rank 0 chose and has checked, once on every machine that sees other files under `path`.

    A shared file system shows the same directory (inode number and time) everywhere, and nothing is read again.
    hashes: as `find_checkpoint`'s `verify`. All ranks call it together; raises CheckpointError on all of them.
    """
    mine = (socket.gethostname(), _identity(path))
    seen: list[tuple[str, tuple[int, int] | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    first_here = seen.index(mine) == dist.get_rank()

    def check() -> None:
        if mine[1] is None:
            raise CheckpointError(
                f"{path} is not there on {mine[0]}: `load` must be on a shared disk, or copied to every machine"
            )
        if first_here and mine[1] != seen[0][1] and (problems := why_not_whole(path, hashes=hashes)):
            raise CheckpointError(f"the copy on {mine[0]} is not whole: {'; '.join(problems)}")

    all_succeeded(check, f"checking {path}")


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells two directories of the same name apart; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
