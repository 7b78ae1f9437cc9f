"""Execution of one step: identity, check of its inputs, lock, sidecar and report."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from neox.errors import ConfigError, DataError, install_command, os_errors
from neox.files import check_writable, sha256_of, write_text
from neox.log import get_logger
from neox.resume import only_run
from tools.web_text.step import Job, S, Settings, Step, dropped_path

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
        if not isinstance(sidecar, dict) or not all(isinstance(sidecar.get(k), kind) for k, kind in _SIDECAR.items()):
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
        The report: `step`, counts, `seconds`, and `fresh`, false if an earlier run had made the same outputs.

    Raises:
        ConfigError: If an output is one of the inputs, or a package of the step is missing.
        DataError: If an input is missing, bad, or not what the step before it wrote; if a complete run skipped more bad
            inputs than may be skipped now; if the disk is full; or if another run writes the same output.
    """
    files = step.expand(settings.input)
    _check_paths(step, settings, files)
    started = time.monotonic()
    try:
        check_writable(settings.output)
        with only_run(f"{settings.output}.step"):
            old = _old_sidecar(step.outputs(settings)[0])
            inputs = [_checked_input(file, old) for file in files]
            packages = check_packages(step)
            description = {
                "format": _FORMAT,
                "step": step.name,
                "settings": settings.fingerprint(),
                "files": _named_files(settings),
                "packages": packages,
                "inputs": [entry["sha256"] for entry in inputs],
            }
            job = Job(step.name, settings, files, _hash_json(description))
            if old is None or not _is_complete(old, job.identity, step.outputs(settings)):
                _prepare(job, step)
                step.run(job)
                report = {"step": step.name, **job.counts.as_json(), "seconds": round(time.monotonic() - started, 3)}
                sidecar = {**description, "identity": job.identity, "inputs": inputs, "report": report}
                _finish(job, step, sidecar)
                fresh = True
            else:
                report, fresh = old["report"], False
                if report["bad"] > settings.skip_bad:
                    raise DataError(
                        f"{settings.output} was made with {report['bad']:,} bad inputs skipped, such as "
                        f"{report['bad_examples'][0]}. Remove it, and the step runs again, or give "
                        f"--skip-bad {report['bad']}"
                    )
            if settings.report is not None:
                write_text(settings.report, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"{error.filename or settings.output}: {error.strerror or error}") from error
    return {**report, "fresh": fresh}


def _named_paths(settings: Settings) -> list[Path]:
    """Return the files and directories that settings name, besides inputs and outputs."""
    values = [getattr(settings, name) for name in settings.model_fields_set - {"input", "output", "report"}]
    words = [word for value in values for word in (value if isinstance(value, tuple) else (value,))]
    return [word for word in words if isinstance(word, Path)]


def _named_files(settings: Settings) -> dict[str, list[str]]:
    """Return the hashes of the files that settings name, as lists of words or models."""
    hashes = {}
    for name in settings.model_fields_set - settings.RUNTIME:
        value = getattr(settings, name)
        paths = [path for path in (value if isinstance(value, tuple) else (value,)) if isinstance(path, Path)]
        if paths:
            hashes[name] = [sha256_of(path) for path in paths if path.is_file()]
    return hashes


def _check_paths(step: Step[S], settings: S, files: tuple[str, ...]) -> None:
    if not files:
        raise DataError(f"{step.name}: no inputs; give files or directories with --input")
    if (problem := step.output_problem(settings)) is not None:
        raise ConfigError(f"{step.name}: {problem}")
    outputs = (settings.output, *step.outputs(settings), dropped_path(settings.output))
    reports = tuple(path for path in (settings.report,) if path is not None)
    read = (*map(Path, files), *_named_paths(settings))
    for path in (*read, *outputs, *reports):
        if any("\udc80" <= character <= "\udcff" for character in str(path)):
            raise ConfigError(f"{step.name}: the name {str(path)!r} is not UTF-8: rename it")
    for flag, written, others in (("output", outputs, read), ("report", reports, (*read, *outputs))):
        taken = {path.resolve(): path for path in others}
        if same := [path for path in written if path.resolve() in taken]:
            replaced = taken[same[0].resolve()]
            raise ConfigError(f"{step.name}: writing {same[0]} would replace {replaced}; choose another --{flag}")


def _old_sidecar(output: Path) -> dict[str, Any] | None:
    try:
        return read_sidecar(output)
    except DataError as error:
        _log.warning("%s", error)
        return None


def _checked_input(file: str, old: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe an input, and compare it with what the step that wrote it recorded.

    A hash is computed again only if size or time of the file differ from those in the sidecar of the output.
    """
    path = Path(file)
    with os_errors(DataError, f"{file} cannot be read"):
        status = path.stat()
        entry = {"path": file, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        known = (
            other for other in (old or {}).get("inputs", ()) if {**other, "sha256": None} == {**entry, "sha256": None}
        )
        entry["sha256"] = next((other["sha256"] for other in known), None) or sha256_of(path)
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
    return {name: _version(step, name) for name in step.packages}


def _version(step: Step[S], name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise ConfigError(
            f"the step {step.name} needs the package {name}: {install_command('requirements-webtext.txt')}"
        ) from None


def _is_complete(sidecar: Mapping[str, Any], identity: str, outputs: tuple[Path, ...]) -> bool:
    if sidecar["identity"] != identity:
        return False
    recorded = sidecar["outputs"]
    return all(o.exists() and o.name in recorded and o.stat().st_size == recorded[o.name]["bytes"] for o in outputs)


def _prepare(job: Job[S], step: Step[S]) -> None:
    """Remove what describes another job: sidecars of old outputs, and intermediate files."""
    for output in {job.settings.output, *step.outputs(job.settings)}:
        sidecar_path(output).unlink(missing_ok=True)
    name = job.work / "identity"
    if not name.exists() or name.read_text() != job.identity:
        shutil.rmtree(job.work, ignore_errors=True)
        write_text(name, job.identity)


def _finish(job: Job[S], step: Step[S], sidecar: dict[str, Any]) -> None:
    outputs = step.outputs(job.settings)
    described = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in outputs}
    for output in outputs:
        write_text(sidecar_path(output), json.dumps({**sidecar, "outputs": described}, indent=1, ensure_ascii=False))
    shutil.rmtree(job.work, ignore_errors=True)


def _hash_json(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe_report(settings: Settings, report: Mapping[str, Any]) -> str:
    """Return a report as text for people."""
    seconds = f"{report['seconds']:.1f} s" if report["fresh"] else "complete before"
    read = f"{report['documents_in']:,} in ({report['bytes_in']:,} bytes)"
    written = f"{report['documents_out']:,} out ({report['bytes_out']:,} bytes)"
    lines = [f"{report['step']}: {read}, {written}, {seconds}"]
    lines += [
        f"  dropped {n:>9,}  {reason}" for reason, (n, _) in sorted(report["dropped"].items(), key=lambda i: -i[1][0])
    ]
    lines += [f"  changed {n:>9,}  {name}" for name, n in sorted(report["changed"].items(), key=lambda i: -i[1])]
    if report["bad"]:
        lines.append(f"  skipped {report['bad']:>9,}  bad inputs, the first: {report['bad_examples'][0]}")
    return "\n".join([*lines, f"  -> {settings.output}"])
