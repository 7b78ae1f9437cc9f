"""The whole test suite, slow tests included, on one commit: `make test-all`.

    make test-all                 every test file; an interrupted run continues where it was
    make test-all SHARD=2/4       the second of four shards of about equal length, for four machines
    .venv/bin/python tests/whole_suite.py --merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl
                                  one table of all shards; status 1 unless every file has passed on one commit

A report has a line for each file that is done. Files that have passed on the checked-out commit are not run again.
Files that failed run once more, alone: one that passes then is listed as flaky.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests/whole_suite_seconds.tsv"
"""Measured seconds of each file, from which shards of about equal length are made; written by `--merge --seconds`."""
_SECONDS_OF_SLOW_FILE = 180.0  # of a file that nobody has measured
_SECONDS_OF_FAST_FILE = 10.0
_LONGEST_LISTED = 15


@dataclass
class FileResult:
    """Outcome of one test file on one commit; `seconds` is the sum over its tests, `retried` a second run alone."""

    commit: str
    file: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    retried: bool = False
    failures: list[str] = field(default_factory=list)


class ReportWriter:
    """Pytest plugin that appends the result of each file to the report as soon as its last test has ended."""

    def __init__(self, path: Path, commit: str, *, retried: bool = False) -> None:
        self._path, self._commit, self._retried = path, commit, retried
        self._results: dict[str, FileResult] = {}
        self._tests_left: Counter[str] = Counter()
        self._recorded: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of each file, without xdist."""
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Count the tests of each file, of which every worker collects the same."""
        self._expect(ids)

    def _expect(self, ids: Iterable[str]) -> None:
        tests = Counter(_file_of(test) for test in ids)
        if tests and not self._results:
            self._tests_left = tests

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported."""
        if report.failed and report.nodeid.endswith(".py"):
            self._write(FileResult(self._commit, report.nodeid, failed=1, failures=[report.nodeid]))

    def record_empty(self, files: Sequence[str]) -> None:
        """Record files of which nothing was collected, because a whole module is skipped here."""
        for name in files:
            if name not in self._tests_left and name not in self._recorded:
                self._write(FileResult(self._commit, name, skipped=1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test to the result of its file."""
        name = _file_of(report.nodeid)
        result = self._results.setdefault(name, FileResult(self._commit, name, retried=self._retried))
        result.seconds += report.duration
        if report.failed:
            result.failed += 1
            result.failures.append(report.nodeid)
        elif report.skipped:
            result.skipped += 1
        elif report.when == "call":
            result.passed += 1
        if report.when == "teardown":
            self._tests_left[name] -= 1
            if self._tests_left[name] == 0:
                self._write(result)

    def _write(self, result: FileResult) -> None:
        self._recorded.add(result.file)
        with self._path.open("a", encoding="utf-8") as report:
            report.write(json.dumps(asdict(result)) + "\n")


def _file_of(node_id: str) -> str:
    return node_id.split("::")[0]


def read_reports(paths: Iterable[Path], commit: str | None = None) -> dict[str, list[FileResult]]:
    """Return the results of each file in the order of its runs, of one commit if it is named."""
    results: dict[str, list[FileResult]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                result = FileResult(**json.loads(line))
            except ValueError:  # a run was killed while it wrote its last line
                continue
            if commit in (None, result.commit):
                results.setdefault(result.file, []).append(result)
    return results


def list_test_files(paths: Sequence[str] = ("tests",)) -> list[str]:
    """Return every test file at or below these paths that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "tests/**/test_*.py", "tests/test_*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in listed.stdout.split() if any(Path(name).is_relative_to(path) for path in paths)]


def expected_seconds(files: Iterable[str]) -> dict[str, float]:
    """Return how long each file is expected to take."""
    measured = {}
    if SECONDS.exists():
        for line in SECONDS.read_text(encoding="utf-8").splitlines():
            name, seconds = line.split("\t")
            measured[name] = float(seconds)
    expected = {}
    for name in files:
        is_slow = "mark.slow" in (ROOT / name).read_text(encoding="utf-8")
        expected[name] = measured.get(name, _SECONDS_OF_SLOW_FILE if is_slow else _SECONDS_OF_FAST_FILE)
    return expected


def shard_of(expected: Mapping[str, float], shard: int, shards: int) -> list[str]:
    """Return the files of one shard, the longest first: each file goes to the shard that is the shortest so far.

    Args:
        expected: Seconds of each file.
        shard: Number of the shard, from 1.
        shards: Number of shards.
    """
    length = [0.0] * shards
    files: list[list[str]] = [[] for _ in range(shards)]
    for name in sorted(expected, key=lambda name: (-expected[name], name)):
        shortest = length.index(min(length))
        length[shortest] += expected[name]
        files[shortest].append(name)
    return files[shard - 1]


def commit_of_checkout() -> str:
    """Return the checked-out commit; exit if tracked files differ from it."""
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    if changed.stdout:
        sys.exit(f"error: the checkout has uncommitted changes, and a report is of one commit:\n{changed.stdout}")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    return head.stdout.strip()


def summary(results: Mapping[str, Sequence[FileResult]], files: Sequence[str]) -> tuple[str, bool]:
    """Return a table of results, and whether every file has passed on the same commit."""
    lines = []
    commits = {result.commit for runs in results.values() for result in runs}
    last = {name: results[name][-1] for name in files if name in results}
    missing = [name for name in files if name not in last]
    failed = [name for name, result in last.items() if result.failed]
    flaky = [name for name, result in last.items() if not result.failed and any(run.failed for run in results[name])]
    longest = sorted(last.values(), key=lambda result: -result.seconds)[:_LONGEST_LISTED]
    lines.append("longest files (seconds of their tests):")
    lines += [f"  {result.seconds:7.0f}  {result.file}" for result in longest]
    for title, names in (("not run", missing), ("failed", failed), ("flaky: failed, then passed alone", flaky)):
        if names:
            lines.append(f"{title}:")
            for name in names:
                tests = [test for run in results.get(name, []) for test in run.failures]
                lines += [f"  {test}" for test in dict.fromkeys(tests)] or [f"  {name}"]
    counts = [sum(getattr(result, outcome) for result in last.values()) for outcome in ("passed", "failed", "skipped")]
    hours = sum(result.seconds for runs in results.values() for result in runs) / 3600
    lines.append(
        f"{len(last)} of {len(files)} files on {' and '.join(sorted(commits)) or 'no commit'}, {hours:.1f} h of tests"
    )
    lines.append(f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
    return "\n".join(lines), not missing and not failed and len(commits) == 1


def _options(report: Path) -> list[str]:
    return ["--hypothesis-profile", "random", "-q", "-o", f"cache_dir={report.parent / 'pytest'}"]


def run_shard(report: Path, tests: Sequence[str], shard: int, shards: int, jobs: str) -> int:
    """Run the files of a shard that have not passed on this commit yet, and return the exit status."""
    commit = commit_of_checkout()
    files = shard_of(expected_seconds(tests), shard, shards)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.touch()

    def not_passed() -> list[str]:
        results = read_reports([report], commit)
        return [name for name in files if name not in results or results[name][-1].failed]

    left = not_passed()
    print(f"# shard {shard} of {shards} at {commit[:12]}: {len(left)} of {len(files)} files are left; report: {report}")
    start = time.monotonic()
    if left:
        parallel = ["-n", jobs, "--dist", "loadfile", "--no-loadscope-reorder", "--continue-on-collection-errors"]
        writer = ReportWriter(report, commit)
        status = pytest.main([*left, *parallel, *_options(report)], [writer])
        if status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            print("# stopped before its end; the same command continues", file=sys.stderr)
            return int(status)
        writer.record_empty(left)
    ran = set(read_reports([report], commit))
    for name in not_passed():
        if name in ran:  # in a process of its own, whose imports no other file has changed
            command = [sys.executable, __file__, "--report", str(report), "--retry", name]
            subprocess.run(command, cwd=ROOT, check=False)
    text, passed = summary(read_reports([report], commit), files)
    print(f"{text}\n# {(time.monotonic() - start) / 60:.0f} minutes")
    return 0 if passed else 1


def main() -> int:
    """Run a shard, or merge reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"], help="files and folders of tests")
    parser.add_argument("--shard", default="1/1", help="K/N: the K-th of N parts")
    parser.add_argument("--jobs", default="3", help="tests that run at once")
    parser.add_argument("--report", type=Path, help="file of the results, one JSON line for each test file")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="REPORT", help="print one table of these reports")
    parser.add_argument("--seconds", action="store_true", help=f"with --merge: write {SECONDS.relative_to(ROOT)}")
    parser.add_argument("--retry", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.merge:
        results = read_reports(arguments.merge)
        if arguments.seconds:
            rows = [f"{name}\t{runs[0].seconds:.0f}\n" for name, runs in sorted(results.items())]
            SECONDS.write_text("".join(rows), encoding="utf-8")
        text, passed = summary(results, list_test_files())
        print(text)
        return 0 if passed else 1
    if arguments.report is None:
        parser.error("--report or --merge is needed")
    if arguments.retry:
        plugin = ReportWriter(arguments.report, commit_of_checkout(), retried=True)
        return int(pytest.main([arguments.retry, *_options(arguments.report)], [plugin]))
    shard, _, shards = arguments.shard.partition("/")
    if not (shard.isdigit() and shards.isdigit() and 1 <= int(shard) <= int(shards)):
        parser.error(f"--shard {arguments.shard}: write K/N with K from 1 to N")
    tests = list_test_files(arguments.paths)
    return run_shard(arguments.report.absolute(), tests, int(shard), int(shards), arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
