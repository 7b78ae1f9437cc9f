"""Execution of one step: checks of its paths and inputs, lock, sidecar and report."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import filterfalse
from pathlib import Path
from typing import Any

from neox.errors import ConfigError, DataError, install_command, os_errors
from neox.files import check_writable, sha256_of, write_text
from neox.log import get_logger
from neox.resume import lock_output
from neox.storage import is_remote, shown, state_of
from tools.web_text.step import Job, S, Settings, Step, dropped_path, without

_log = get_logger(f"neox.{__name__}")
_FORMAT = 1
_SIDECAR = {"step": str, "identity": str, "inputs": list, "outputs": dict, "report": dict}


def sidecar_path(output: Path) -> Path:
    """Return `OUTPUT.step.json`."""
    return output.with_name(f"{output.name}.step.json")


def read_sidecar(output: str | Path) -> dict[str, Any] | None:
    """Return the sidecar of a file; None if it has none. Raises DataError if it cannot be read."""
    path = sidecar_path(Path(output))
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(sidecar, dict):
            raise ValueError("no step wrote it")
        for key, kind in _SIDECAR.items():
            if not isinstance(sidecar.get(key), kind):
                raise ValueError("no step wrote it")
        return sidecar
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it, and the step runs again") from error


def run_step(step: Step[S], settings: S) -> dict[str, Any]:
    """Run a step, resume it, or find that it is complete.

    Args:
        step: The step.
        settings: Its settings.

    Returns:
        The report: `step`, counts, `seconds`, and `fresh`, which is false if an earlier run had made the same outputs.

    Raises:
        ConfigError: If an output is one of the inputs, or a package of the step is missing.
        DataError: If an input is missing, bad, or not what the step before it wrote; if a complete run skipped more bad
            inputs than may be skipped now; if the disk is full; or if another run writes the same output.
    """
    files = step.expand(settings.input)
    _check_paths(step, settings, files)
    try:
        check_writable(settings.output)
        with lock_output(f"{settings.output}.step"):
            report = _run_or_keep(step, settings, files)
            if settings.report is not None:
                text = json.dumps(without(report, "fresh"), indent=1, ensure_ascii=False)
                write_text(settings.report, f"{text}\n")
    except OSError as error:
        raise DataError(f"{error.filename or settings.output}: {error.strerror or error}") from error
    return report


def _run_or_keep(step: Step[S], settings: S, files: tuple[str, ...]) -> dict[str, Any]:
    """Run a step whose output is locked, unless an equal run is complete.

    `identity` is a hash of the step, its settings, its packages and the contents of its inputs. It stands in three
    places:

        OUTPUT.work/identity    an interrupted run with these intermediate files, which continues
        Job.identity            of this run
        OUTPUT.step.json        a complete run, whose outputs have the sizes that are recorded there

    Returns:
        The report, with `fresh`.
    """
    started = time.monotonic()
    outputs = step.outputs(settings)
    old = None
    try:
        old = read_sidecar(outputs[0])
    except DataError as error:
        _log.warning("%s", error)
    inputs = [_checked_input(file, old) for file in files]
    named_files: dict[str, list[str]] = {}  # that change the output, such as word lists and models
    for name in settings.model_fields_set - settings.RUNTIME:
        if paths := _paths_of(settings, name):
            named_files[name] = [sha256_of(path) for path in paths if path.is_file()]
    description = {
        "format": _FORMAT,
        "step": step.name,
        "settings": settings.fingerprint(),
        "files": named_files,
        "packages": check_packages(step),
        "inputs": [entry["sha256"] for entry in inputs],
    }
    job = Job(step.name, settings, files, _hash_json(description))

    # Is an equal run complete?
    if old is not None and old["identity"] == job.identity:
        recorded = [old["outputs"].get(path.name, {}).get("bytes") for path in outputs]
        sizes = [path.stat().st_size if path.exists() else -1 for path in outputs]
        if recorded == sizes:
            report = old["report"]
            if report["bad"] > settings.skip_bad:
                raise DataError(
                    f"{settings.output} was made with {report['bad']:,} bad inputs skipped, such as "
                    f"{report['bad_examples'][0]}. Remove it, and the step runs again, or give --skip-bad "
                    f"{report['bad']}"
                )
            return {**report, "fresh": False}

    # What describes another run goes: sidecars of old outputs, and intermediate files.
    for output in {settings.output, *outputs}:
        sidecar_path(output).unlink(missing_ok=True)
    name_of_work = job.work / "identity"
    if not name_of_work.exists() or name_of_work.read_text() != job.identity:
        shutil.rmtree(job.work, ignore_errors=True)
        write_text(name_of_work, job.identity)

    step.run(job)
    report = {"step": step.name, **job.counts.as_json(), "seconds": round(time.monotonic() - started, 3)}
    written = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in outputs}
    sidecar = {**description, "identity": job.identity, "inputs": inputs, "report": report, "outputs": written}
    text = json.dumps(sidecar, indent=1, ensure_ascii=False)
    for output in outputs:
        write_text(sidecar_path(output), text)
    shutil.rmtree(job.work, ignore_errors=True)
    return {**report, "fresh": True}


def _paths_of(settings: Settings, name: str) -> list[Path]:
    """Return the paths in a setting."""
    value = getattr(settings, name)
    values = value if isinstance(value, tuple) else (value,)
    return [entry for entry in values if isinstance(entry, Path)]


def _check_paths(step: Step[S], settings: S, files: tuple[str, ...]) -> None:
    """Check the names of inputs and outputs. Raises DataError without inputs, ConfigError if a file is replaced."""
    if not files:
        raise DataError(f"{step.name}: no inputs; give files or directories with --input")
    if (problem := step.output_problem(settings)) is not None:
        raise ConfigError(f"{step.name}: {problem}")
    read = list(map(Path, filterfalse(is_remote, files)))
    for name in settings.model_fields_set - {"input", "output", "report"}:
        read += _paths_of(settings, name)
    outputs = [settings.output, *step.outputs(settings), dropped_path(settings.output)]
    reports = _paths_of(settings, "report")
    for path in (*read, *outputs, *reports):
        if any("\udc80" <= character <= "\udcff" for character in str(path)):
            raise ConfigError(f"{step.name}: the name {str(path)!r} is not UTF-8: rename it")
    _check_kept(step, "output", outputs, read)
    _check_kept(step, "report", reports, [*read, *outputs])


def _check_kept(step: Step[S], flag: str, written: Iterable[Path], others: Iterable[Path]) -> None:
    """Raise ConfigError if writing one of some files would replace one of the others."""
    kept = {path.resolve(): path for path in others}
    for path in written:
        if (replaced := kept.get(path.resolve())) is not None:
            raise ConfigError(f"{step.name}: writing {path} would replace {replaced}; choose another --{flag}")


def _checked_input(file: str, old: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe an input by size, time and hash, and compare it with what the step that wrote it recorded.

    If the old sidecar of the output has an input of this size and time, its hash is not computed again.

    Raises:
        DataError: If it cannot be read, is not what that step wrote, or its server tags no content, so that a change
            would not be noticed.
    """
    if is_remote(file):  # it is not read: the server's tag stands for its content
        state = state_of(file)
        if not state.version:
            raise DataError(
                f"{shown(file)}: the server has no tag for its content; download it, and give the local file"
            )
        described = {"path": shown(file), "bytes": state.size, "version": state.version}
        return {**described, "sha256": _hash_json(described)}
    path = Path(file)
    with os_errors(DataError, f"{file} cannot be read"):
        status = path.stat()
        entry: dict[str, Any] = {"path": file, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        known = [] if old is None else [other for other in old["inputs"] if entry.items() <= other.items()]
        entry["sha256"] = known[0]["sha256"] if known else sha256_of(path)
    written_by = read_sidecar(path)
    if written_by is not None:
        recorded = written_by["outputs"].get(path.name)
        if recorded is None or recorded["sha256"] != entry["sha256"]:
            raise DataError(
                f"{file} is not what the step {written_by['step']} wrote: the hashes differ. Run that step again, or "
                f"remove {sidecar_path(path)} if the file was changed on purpose"
            )
    return entry


def check_packages(step: Step[Any]) -> dict[str, str]:
    """Return the versions of a step's packages. Raises ConfigError if one is missing."""
    versions = {}
    for name in step.packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            install = install_command("requirements-webtext.txt")
            raise ConfigError(f"the step {step.name} needs the package {name}: {install}") from None
    return versions


def _hash_json(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_report(settings: Settings, report: Mapping[str, Any]) -> str:
    """Return a report as text for people."""
    seconds = f"{report['seconds']:.1f} s" if report["fresh"] else "complete before"
    read = f"{report['documents_in']:,} in ({report['bytes_in']:,} bytes)"
    written = f"{report['documents_out']:,} out ({report['bytes_out']:,} bytes)"
    lines = [f"{report['step']}: {read}, {written}, {seconds}"]
    dropped = {reason: documents for reason, (documents, _) in report["dropped"].items()}
    lines += _table("dropped", dropped)
    lines += _table("changed", report["changed"])
    if report["bad"]:
        lines.append(f"  skipped {report['bad']:>9,}  bad inputs, the first: {report['bad_examples'][0]}")
    return "\n".join([*lines, f"  -> {', '.join(_written_files(settings.output))}"])


def _written_files(output: Path) -> list[str]:
    """Return the output, or the files that begin with it if it is a prefix."""
    if output.exists():
        return [str(output)]
    found = []
    for file in sorted(output.parent.glob(f"{escape(output.name)}[._]*")):
        if file.is_file() and file != sidecar_path(output):
            found.append(str(file))
    return found or [str(output)]


def _table(word: str, counts: Mapping[str, int]) -> list[str]:
    """Return a line for each count, the largest first."""
    largest_first = sorted(counts.items(), key=lambda entry: -entry[1])
    return [f"  {word} {count:>9,}  {name}" for name, count in largest_first]
