"""Preprocessing on several machines that share a file system.

Each rank makes a part from neighbouring inputs, and rank 0 joins the parts. The result has the same bytes as on one
machine. A part is a run of its own: an interrupted one is resumed, and a complete one is kept.

    rank 0   inputs a, b    -> PREFIX.part0000of0003_text_document   |
    rank 1   input c        -> PREFIX.part0001of0003_text_document   | -> rank 0 waits and joins -> PREFIX_text_document
    rank 2   inputs d, e    -> PREFIX.part0002of0003_text_document   |
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from neox.data import IndexedDatasetBuilder
from neox.data.token_files.sidecar import Sidecar, joined_sidecar, read_sidecar, write_sidecar
from neox.errors import DataError
from neox.files import write_text
from neox.launch.agent.agent_files import PROGRESS_VARIABLE
from neox.log import get_logger
from neox.preprocess.preprocess_run import PreprocessReport, finished, preprocess
from neox.preprocess.settings import PreprocessSettings, describe_run, fingerprint
from neox.resume import lock_output
from neox.storage import size_of
from neox.workers import worker_count

_log = get_logger(__name__)
_POLL_SECONDS = 0.5
_LOG_SECONDS = 60.0


def split_files(files: Sequence[str], ranks: int) -> list[tuple[str, ...]]:
    """Divide files into groups of neighbours with about the same size. With too few files, some groups are empty."""
    total = max(sum(map(size_of, files)), 1)
    groups: list[list[str]] = [[] for _ in range(ranks)]
    before = 0  # bytes of the files before this one
    for file in files:
        size = size_of(file)
        middle = before + size // 2
        number = min(ranks - 1, middle * ranks // total)
        groups[number].append(file)
        before += size
    return [tuple(group) for group in groups]


@dataclass(frozen=True)
class RankInfo:
    """Position of this process among the processes of the run.

    Attributes:
        rank: Number of this process.
        ranks: Number of processes.
        local_ranks: Number of processes on this machine.
        local_rank: Number of this process among them.
        shared: Directory that only the processes of this run on this machine use; None without one.
    """

    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1
    local_rank: int = 0
    shared: Path | None = None

    @staticmethod
    def of(environment: Mapping[str, str]) -> RankInfo:
        """Read the position from environment variables of a launcher. Without them, there is one process."""
        local_ranks = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or "1"
        progress = environment.get(PROGRESS_VARIABLE)
        return RankInfo(
            rank=int(environment.get("RANK", "0")),
            ranks=int(environment.get("WORLD_SIZE", "1")),
            local_ranks=int(local_ranks),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            shared=Path(progress).parent if progress else None,
        )


@dataclass(frozen=True)
class _DividedInputs:
    """Division of the inputs between ranks.

    Attributes:
        groups: Files of each rank, with the commit in the addresses of the hub.
        complete: Whether an earlier run has finished with the same inputs and settings.
    """

    groups: tuple[tuple[str, ...], ...]
    complete: bool


def preprocess_on_rank(settings: PreprocessSettings, where: RankInfo) -> PreprocessReport | None:
    """Make the part of this rank. Rank 0 then waits for the other parts and joins them.

    All ranks must see the same files under the same paths.

    Args:
        settings: Settings of the whole run.
        where: Position of this process.

    Returns:
        Report of the whole run on rank 0, None on other ranks.

    Raises:
        DataError: For the reasons of `preprocess`. Also for `restart`, because one rank cannot discard the parts of
            the others.
        TokenizerError: For the reasons of `preprocess`.
    """
    if where.ranks == 1:
        return preprocess(settings)
    if settings.restart:
        raise DataError("--restart needs a single process: remove the output and its parts instead")
    if not settings.workers:
        settings = replace(settings, workers=max(1, worker_count(0) // where.local_ranks))
    division = _division(settings, where)
    settings = _of_files(settings, tuple(chain.from_iterable(division.groups)))
    if division.complete:
        return finished(settings) if where.rank == 0 else None
    started = time.monotonic()
    runs: dict[int, PreprocessSettings] = {}  # the part of each rank that has files
    for rank, group in enumerate(division.groups):
        if group:
            prefix = f"{settings.output_prefix}.part{rank:04}of{where.ranks:04}"
            runs[rank] = replace(_of_files(settings, group), output_prefix=prefix)
    if where.rank in runs:
        preprocess(runs[where.rank], may_be_empty=True)
    if where.rank != 0:
        return None

    # Rank 0 waits for the others, and joins.
    parts = list(runs.values())
    missing = parts
    logged = time.monotonic()
    while missing := [part for part in missing if finished(part) is None]:
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - logged > _LOG_SECONDS:
            _log.info("waiting for %d parts, among them %s", len(missing), missing[0].output_prefix)
            logged = time.monotonic()
    with lock_output(settings.output_prefix):
        joined = {key: _join_key(settings, parts, key) for key in settings.keys}
    for part in parts:
        for key in settings.keys:
            for suffix in ("bin", "idx", "json", "columns.jsonl"):
                Path(f"{part.prefix(key)}.{suffix}").unlink(missing_ok=True)
    return PreprocessReport.of(joined, seconds=time.monotonic() - started, accelerator=settings.accelerator)


def _division(settings: PreprocessSettings, where: RankInfo) -> _DividedInputs:
    """Return the division of the inputs. On each machine, one process asks servers for files and sizes, if possible."""
    path = where.shared / "inputs.json" if where.shared is not None else None
    if path is not None and where.local_rank != 0:
        while not path.exists():  # the launcher ends all ranks if the one that asks fails
            time.sleep(_POLL_SECONDS)
        found = json.loads(path.read_text(encoding="utf-8"))
        return _DividedInputs(tuple(map(tuple, found["groups"])), found["complete"])
    files = settings.files()
    complete = finished(_of_files(settings, files)) is not None
    division = _DividedInputs(tuple(split_files(files, where.ranks)), complete)
    if path is not None:
        write_text(path, json.dumps(asdict(division)))
    return division


def _of_files(settings: PreprocessSettings, files: tuple[str, ...]) -> PreprocessSettings:
    """Return settings with the files that the inputs stand for, for which no server is asked again."""
    return replace(settings, inputs=files, split=None, config=None)


def _join_key(settings: PreprocessSettings, parts: Sequence[PreprocessSettings], key: str) -> Sidecar:
    """Join the parts of one key, and return the sidecar of the result. Raises DataError for too many bad inputs."""
    sidecars = []
    skipped = 0
    text_bytes = 0
    filtered = 0
    for part in parts:
        sidecar = read_sidecar(part.prefix(key))
        if sidecar is None:
            raise DataError(f"{part.prefix(key)}.json has disappeared: give the same command again")
        sidecars.append(sidecar)
        skipped += sidecar.settings["skipped"]
        text_bytes += sidecar.settings["text_bytes"]
        filtered += sidecar.settings.get("filtered", 0)
    if skipped > settings.skip_bad:
        raise DataError(
            f"{skipped} bad inputs over all parts, more than --skip-bad {settings.skip_bad}: allow {skipped}"
        )
    joined = joined_sidecar(sidecars)
    if not joined.documents:
        raise DataError(f"the inputs hold no text under {key}: nothing was written")
    prefix = settings.prefix(key)
    sentences = settings.sentences is not None
    with IndexedDatasetBuilder(
        prefix,
        joined.settings["dtype"],
        impl=settings.impl,
        sentences=sentences,
        columns=bool(settings.kept_columns),
    ) as builder:
        for part in parts:
            builder.merge(part.prefix(key))
    # The settings are those of one process that makes the whole.
    description = describe_run(settings, settings.files(), joined.tokenizer_hash)
    result = {"run": fingerprint(description), "skipped": skipped, "text_bytes": text_bytes, **builder.columns_state}
    if settings.filters:
        result["filtered"] = filtered
    whole = replace(joined, settings={**joined.settings, **description, **result}, crc32=builder.progress["crc32"])
    write_sidecar(prefix, whole)
    return whole
