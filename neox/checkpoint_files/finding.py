"""Which checkpoint of a directory counts: the one search, by the launcher, ranks, tools, status, exports and mirrors.

    SAVE/latest -> global_step20      1. the checkpoint that `latest` names, so that editing `latest` rolls a run back;
    SAVE/global_step10                   before it one whose save was interrupted before it wrote `latest`
    SAVE/global_step20                2. the others, the last commit first
    SAVE/global_step30                The first complete one counts: all files in full, and with `hashes` their content.

`iteration` leaves one candidate. A directory with model files of its own is itself the only candidate, unless its name
tells another iteration.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from neox.checkpoint_files.contents import is_checkpoint, why_incomplete
from neox.checkpoint_files.manifest import read_manifest
from neox.checkpoint_files.names import LATEST, PENDING, REPLACED, parse_step_directory, step_directory
from neox.errors import CheckpointError, NoCheckpointError
from neox.log import get_logger

_log = get_logger(__name__)

WITHOUT_LOAD = "remove `load` to start from scratch"
"""What a user can do if the key `load` leads to no checkpoint."""


@dataclass(frozen=True)
class Search:
    """Result of a search in a directory of checkpoints.

    Attributes:
        found: The checkpoint that counts; None if none is complete.
        candidates: All checkpoints that may count, in the order of the search.
        incomplete: Reasons why candidates before `found` do not count, by path.
        warnings: What is unusual about the order: `latest` is missing, or names none of them, or an older one.
    """

    found: Path | None
    candidates: tuple[Path, ...]
    incomplete: dict[Path, list[str]]
    warnings: tuple[str, ...] = ()


def search_checkpoint(
    directory: Path, iteration: int | None = None, *, hashes: bool = False, without: Collection[Path] = ()
) -> Search:
    """Search a directory for the checkpoint that counts.

    Args:
        directory: A directory of `global_stepN` directories, or such a directory itself. It may be missing.
        iteration: The only iteration that may count; None for any.
        hashes: Whether all content is read and compared with the manifest. gpt-neox writes no manifest; the checksums
            inside its files are compared instead.
        without: Checkpoints that are known to be damaged.
    """
    warnings: list[str] = []
    if not directory.is_dir():
        candidates: list[Path] = []
    elif is_checkpoint(directory) and not checkpoint_directories(directory):
        candidates = []
        if iteration is None or step_of(directory.resolve()) in (None, iteration):
            candidates = [directory]
    elif iteration is not None:
        names = (step_directory(iteration), f"{REPLACED}{step_directory(iteration)}")
        candidates = list(filter(lambda path: path.name in names, checkpoint_directories(directory)))
    else:
        candidates = _ordered(directory, warnings)
    incomplete: dict[Path, list[str]] = {}
    for path in candidates:
        reasons = ["it was found damaged at this run's last start"] if path in without else []
        reasons = reasons or why_incomplete(path, hashes=hashes)
        if not reasons:
            return Search(path, tuple(candidates), incomplete, tuple(warnings))
        incomplete[path] = reasons
    return Search(None, tuple(candidates), incomplete, tuple(warnings))


def newest_checkpoint(directory: str | Path, iteration: int | None = None) -> Path | None:
    """Return the checkpoint that counts in a directory, by the sizes of its files; None if none is complete."""
    return search_checkpoint(Path(directory), iteration).found


def find_checkpoint(
    load: str | Path,
    iteration: int | None = None,
    *,
    verify: bool = True,
    way_out: str = WITHOUT_LOAD,
) -> Path:
    """Return the checkpoint to load, and log the choice and its reason.

    Args:
        load: A directory of `global_stepN` directories, or such a directory itself.
        iteration: The only iteration that may be loaded; None for any.
        verify: Whether all content is read and compared with hashes or checksums.
        way_out: What a user can do if there is no checkpoint, for the message.

    Raises:
        NoCheckpointError: If none is complete, with a reason for each.
        CheckpointError: If the only one that may be loaded is not complete.
    """
    load = Path(load)
    if not load.is_dir():
        raise CheckpointError(f"load: {load} is not a directory, and there is nothing to resume from; {way_out}")
    started = time.perf_counter()
    search = search_checkpoint(load, iteration, hashes=verify)
    seconds = max(time.perf_counter() - started, 1e-9)
    for warning in search.warnings:
        _log.warning("%s", warning)
    skipped = []
    for path, reasons in search.incomplete.items():
        _log.warning("checkpoint %s is not complete: %s", path, "; ".join(reasons))
        skipped.append(f"{path.name}: {'; '.join(reasons)}")
    if search.found is not None:
        checked = "sizes checked"
        if verify:
            megabytes = sum(file.stat().st_size for file in search.found.rglob("*") if file.is_file()) / 1e6
            checked = f"hashes of {megabytes:,.0f} MB checked, {megabytes / seconds:,.0f} MB/s"
        newer = f"; skipped {len(skipped)} newer: {' | '.join(skipped)}" if skipped else ""
        _log.info("loading checkpoint %s (%s)%s", with_steps(search.found), checked, newer)
        return search.found
    if iteration is not None and not search.candidates:
        names = names_of_checkpoints(load) or "none"
        raise CheckpointError(f"iteration: {load / step_directory(iteration)} does not exist; {load} has: {names}")
    if iteration is not None or search.candidates == (load,):
        [path] = search.candidates
        raise CheckpointError(f"{path} is not complete: {'; '.join(search.incomplete[path])}")
    found = "\n  ".join(skipped) or "no global_stepN directories"
    raise NoCheckpointError(f"load: no complete checkpoint in {load}:\n  {found}\n{way_out}")


def _ordered(directory: Path, warnings: list[str]) -> list[Path]:
    """Return the checkpoints in the order in which to try them, and add what is unusual about it to `warnings`."""
    order = sorted(checkpoint_directories(directory), key=_sequence, reverse=True)
    named = _named_by_latest(directory)
    if isinstance(named, Path):
        if order and _sequence(order[0]) > _sequence(named) and not (directory / PENDING).is_file():
            newer = order[0].name
            warnings.append(f"`latest` names {named.name}, not the newer {newer}; `iteration` chooses another")
        if named in order:
            order.remove(named)
        order.insert(0, named)
    elif order:
        warnings.append(f"{directory / LATEST} {named}; taking the newest complete checkpoint")
    try:
        interrupted = directory / (directory / PENDING).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return order
    if interrupted in order and interrupted != named:
        warnings.append(f"the save of {interrupted.name} was interrupted before it wrote `latest`; trying it first")
        order.remove(interrupted)
        order.insert(0, interrupted)
    return order


def _named_by_latest(directory: Path) -> Path | str:
    """Return the checkpoint that `latest` names, which may have any name; or why it names none.

    A link such as `best` stands for the checkpoint beside it to which it leads: only that one's name tells its step.
    """
    try:
        tag = (directory / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    path = directory / tag
    if tag and Path(tag).name == tag and path.is_dir():
        target = path.resolve()
        if target.parent == directory.resolve():
            return directory / target.name
        return path
    return f"names {tag!r}, which does not exist" if tag else "is empty"


def _sequence(path: Path) -> int:
    """Return the number of a checkpoint's commit; 0 without a manifest, or with a broken one."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return 0
    return 0 if manifest is None else manifest.sequence


def checkpoint_directories(save: Path) -> list[Path]:
    """Return the `global_stepN` directories, newest iteration first; none if there is no such directory.

    A save of the same iteration that was killed between its two renames leaves the earlier one under another name. That
    one counts as long as nothing has its place: the next start puts it back.
    """
    found: dict[int, Path] = {}
    paths = sorted(save.iterdir()) if save.is_dir() else ()  # `.replaced-global_stepN` before `global_stepN`
    for path in paths:
        step = parse_step_directory(path.name.removeprefix(REPLACED))
        if step is not None and path.is_dir():
            found[step] = path
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(checkpoint: Path) -> int | None:
    """Return the number of steps that a checkpoint's name tells; None for a checkpoint of another name."""
    return parse_step_directory(checkpoint.name.removeprefix(REPLACED))


def contains_checkpoints(directory: Path) -> bool:
    """Return whether a directory is a checkpoint or contains one, complete or not."""
    if not directory.is_dir():
        return False
    if checkpoint_directories(directory) or any(directory.glob("*.pt")):
        return True
    return isinstance(_named_by_latest(directory), Path)


def names_of_checkpoints(save: Path) -> str:
    """Return the names of all checkpoints in a directory, separated by commas."""
    return ", ".join(sorted(path.name for path in checkpoint_directories(save)))


def with_steps(path: Path) -> str:
    """Return a checkpoint's path and its number of steps, as far as its name tells it."""
    step = step_of(path.resolve())
    if step is None:
        return str(path)
    return f"{path}, {step:,} steps"
