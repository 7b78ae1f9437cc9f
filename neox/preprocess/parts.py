"""Preprocessing on several machines that share a file system: each rank makes a part, rank 0 concatenates the parts.

A part is a run over neighbouring inputs. So the bytes of the result are those of one machine, an interrupted part is
resumed, and a complete part is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neox.corpus import expand_inputs
from neox.data import IndexedDatasetBuilder
from neox.data.sidecar import Sidecar, joined_sidecar, read_sidecar, write_sidecar
from neox.errors import DataError
from neox.log import get_logger
from neox.preprocess.run import PreprocessReport, finished, preprocess
from neox.preprocess.settings import PreprocessSettings, describe_run, fingerprint
from neox.resume import only_run

_log = get_logger(__name__)
_POLL_SECONDS = 0.5
_LOG_SECONDS = 60.0


def split_files(files: Sequence[str], ranks: int) -> list[tuple[str, ...]]:
    """Divide files into `ranks` groups of neighbours with about equal bytes; with too few files some are empty."""
    sizes = [os.path.getsize(file) for file in files]
    total, before = max(sum(sizes), 1), 0
    groups: list[list[str]] = [[] for _ in range(ranks)]
    for file, size in zip(files, sizes, strict=True):
        groups[min(ranks - 1, (before + size // 2) * ranks // total)].append(file)
        before += size
    return [tuple(group) for group in groups]


@dataclass(frozen=True)
class RankInfo:
    """Position of this process among those of the run.

    Attributes:
        rank: Number of this process.
        ranks: Number of processes.
        local_ranks: Number of processes on this machine.
    """

    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1

    @staticmethod
    def of(environment: Mapping[str, str]) -> RankInfo:
        """Read RANK, WORLD_SIZE, and LOCAL_WORLD_SIZE or LOCAL_SIZE of a launcher; without them, one process."""
        ranks = int(environment.get("WORLD_SIZE", "1"))
        local = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or 1)
        return RankInfo(int(environment.get("RANK", "0")), ranks, local)


def preprocess_on_rank(settings: PreprocessSettings, where: RankInfo) -> PreprocessReport | None:
    """Make this rank's part; rank 0 waits for the other parts and concatenates them.

    All ranks must see the same files under the same paths.

    Args:
        settings: Settings of the whole run.
        where: Position of this process.

    Returns:
        Report of the whole run on rank 0, None on other ranks.

    Raises:
        DataError: As `preprocess`; and for `restart`, which one rank cannot decide for the others.
        TokenizerError: As `preprocess`.
    """
    rank, ranks = where.rank, where.ranks
    if ranks == 1:
        return preprocess(settings)
    if not settings.workers:
        settings = replace(settings, workers=max(1, len(os.sched_getaffinity(0)) // where.local_ranks))
    if settings.restart:
        raise DataError("--restart needs a single process: remove the output and its parts instead")
    parts = _parts(settings, ranks)
    done = finished(settings)
    if done is not None:
        return done if rank == 0 else None
    started = time.monotonic()
    if (own := parts[rank]) is not None:
        preprocess(own, may_be_empty=True)
    if rank:
        return None
    present = [part for part in parts if part is not None]
    _wait_for(present)
    return _join(settings, present, started)


def _parts(settings: PreprocessSettings, ranks: int) -> list[PreprocessSettings | None]:
    """Return the settings of each rank's part, None for a rank without files."""
    groups = split_files(expand_inputs(settings.inputs), ranks)
    return [
        replace(settings, inputs=group, output_prefix=f"{settings.output_prefix}.part{rank:04}of{ranks:04}")
        if group
        else None
        for rank, group in enumerate(groups)
    ]


def _wait_for(parts: Sequence[PreprocessSettings]) -> None:
    missing, logged = list(parts), time.monotonic()
    while missing := [part for part in missing if finished(part) is None]:
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - logged > _LOG_SECONDS:
            _log.info("waiting for %d of %d parts, %s first", len(missing), len(parts), missing[0].output_prefix)
            logged = time.monotonic()


def _join(settings: PreprocessSettings, parts: Sequence[PreprocessSettings], started: float) -> PreprocessReport:
    skipped = text_bytes = 0
    documents, tokens = {}, {}
    with only_run(settings.output_prefix):
        for key in settings.keys:
            sidecars = [_sidecar(part.prefix(key)) for part in parts]
            skipped = sum(sidecar.settings["skipped"] for sidecar in sidecars)
            text_bytes = sum(sidecar.settings["text_bytes"] for sidecar in sidecars)
            if skipped > settings.skip_bad:
                raise DataError(
                    f"{skipped} bad inputs over all parts, more than --skip-bad {settings.skip_bad}: allow {skipped}"
                )
            joined = _described(settings, joined_sidecar(sidecars), skipped, text_bytes)
            if not joined.documents:
                raise DataError(f"the inputs hold no text under {key}: nothing was written")
            _join_key(settings, parts, key, joined)
            documents[key], tokens[key] = joined.documents, joined.tokens
    for part in parts:
        for key in settings.keys:
            for suffix in ("bin", "idx", "json"):
                Path(f"{part.prefix(key)}.{suffix}").unlink(missing_ok=True)
    return PreprocessReport(documents, tokens, skipped, text_bytes, time.monotonic() - started, settings.accelerator)


def _join_key(settings: PreprocessSettings, parts: Sequence[PreprocessSettings], key: str, joined: Sidecar) -> None:
    prefix = settings.prefix(key)
    sentences, dtype = settings.sentences is not None, joined.settings["dtype"]
    with IndexedDatasetBuilder(prefix, dtype, impl=settings.impl, sentences=sentences) as builder:
        for part in parts:
            builder.merge(part.prefix(key))
    write_sidecar(prefix, replace(joined, crc32=builder.progress["crc32"]))


def _sidecar(prefix: str) -> Sidecar:
    found = read_sidecar(prefix)
    if found is None:
        raise DataError(f"{prefix}.json has disappeared: give the same command again")
    return found


def _described(settings: PreprocessSettings, joined: Sidecar, skipped: int, text_bytes: int) -> Sidecar:
    """Return the sidecar that one process would have written for the whole."""
    whole = describe_run(settings, expand_inputs(settings.inputs), joined.tokenizer_hash)
    result = {**whole, "run": fingerprint(whole), "skipped": skipped, "text_bytes": text_bytes}
    return replace(joined, settings={**joined.settings, **result})
