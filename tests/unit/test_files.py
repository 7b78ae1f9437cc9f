"""Atomic replacement, fsync and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from neox.files import (
    atomic_directory,
    atomic_shared_write,
    atomic_write,
    check_writable,
    fsync_path,
    lock_file,
    partial_path,
    read_json_object,
    unwritable_parent,
    write_text,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_when_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "made" / "x.bin"
    with atomic_write(path) as file:
        file.write(b"new")
        assert names(path.parent) == [partial_path(path).name] == ["x.bin.partial"]
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["x.bin"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_content(tmp_path: Path, error: type[BaseException]) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    write_text(file, "old")
    with atomic_directory(directory) as partial:
        (partial / "old").touch()

    def parts():
        yield "new"
        raise error

    with pytest.raises(error):
        write_text(file, parts())
    with pytest.raises(error), atomic_write(file):
        raise error
    with pytest.raises(error), atomic_directory(directory):
        raise error
    assert file.read_text() == "old"
    assert names(directory) == ["old"]
    assert names(tmp_path) == ["directory", "file"]


def test_a_full_disk_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as error:
        write_text(tmp_path / "file", "new")
    assert error.value.errno == errno.ENOSPC
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_file_left_by_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x"
    partial_path(path).write_bytes(b"a longer content than the next")
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_processes_that_write_one_file_at_the_same_time(tmp_path: Path) -> None:
    """A sweep and a `--report` beside it draw the same picture."""
    path = tmp_path / "picture.png"
    other = "import sys, neox.files as f\nwith f.atomic_shared_write(f.Path(sys.argv[1])) as x: x.write(b'2')"
    with atomic_shared_write(path) as file:
        file.write(b"1")
        subprocess.run([sys.executable, "-c", other, str(path)], check=True)
        assert path.read_bytes() == b"2"
    assert path.read_bytes() == b"1"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_replaces_a_directory_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    (tmp_path / "b").touch()
    for name in ("a", "b", "c"):
        with atomic_directory(tmp_path / name) as partial:
            (partial / "new").touch()
        assert names(tmp_path / name) == ["new"]
    assert names(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("renames", [0, 1])
def test_a_directory_that_cannot_be_renamed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, error: type[BaseException]
) -> None:
    """Renames are the old directory's, the new one's, and the old one's back."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    rename, done = os.rename, []

    def fail_once(source: Path, target: Path) -> None:
        done.append(source)
        if len(done) == renames + 1:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(error), atomic_directory(tmp_path / "a") as partial:
        (partial / "new").touch()
    assert names(tmp_path / "a") == ["old"]
    assert names(tmp_path) == ["a"]


def test_the_old_directory_is_kept_where_it_cannot_be_renamed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    rename = os.rename

    def fail_to_create(source: Path, target: Path) -> None:
        if target == tmp_path / "a":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_to_create)
    with pytest.raises(OSError) as error, atomic_directory(tmp_path / "a") as partial:
        (partial / "new").touch()
    assert error.value.errno == errno.EIO
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".old"
    assert names(kept) == ["old"]


def test_a_directory_that_another_process_creates_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    rename = os.rename

    def rename_later(source: Path, target: Path) -> None:
        if source.suffix == ".partial":
            target.mkdir()
            (target / "theirs").touch()
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_later)
    with pytest.raises(OSError) as refused, atomic_directory(tmp_path / "a"):
        pass
    assert refused.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    assert names(tmp_path / "a") == ["theirs"]
    assert names(tmp_path) == ["a"]


def test_a_link_stays_and_its_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "disk" / "a" / "old").touch()
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
        with atomic_directory(tmp_path / name) as partial:
            (partial / "new").touch()
        assert (tmp_path / name).is_symlink()
    assert names(tmp_path) == ["a", "b", "disk"]
    assert names(tmp_path / "disk") == ["a", "b"]
    assert names(tmp_path / "disk" / "a") == names(tmp_path / "disk" / "b") == ["new"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_directories_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    if code == errno.EINVAL:  # some network file systems
        fsync_path(tmp_path)
    else:
        with pytest.raises(OSError) as error:
            fsync_path(tmp_path)
        assert error.value.errno == code
    with pytest.raises(OSError) as error:
        fsync_path(tmp_path / "file")
    assert error.value.errno == code


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys\nfrom pathlib import Path\nfrom neox.files import lock_file\n"
        "file = open(sys.argv[1], 'w')\nassert lock_file(file, wait=True)\nprint('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with open(path) as file:
        with pytest.raises(BlockingIOError):
            lock_file(file, wait=False)
        process.kill()
        process.communicate()
        assert lock_file(file, wait=False)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with open(tmp_path / "lock", "w") as file:
        assert not lock_file(file, wait=True)


def test_whether_a_file_could_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert unwritable_parent(tmp_path / "a" / "b") is None
    assert unwritable_parent(tmp_path / "file" / "b") == tmp_path / "file"
    check_writable(tmp_path / "new" / "x")
    assert names(tmp_path / "new") == []
    with pytest.raises(OSError):
        check_writable(tmp_path / "file" / "x")


@pytest.mark.parametrize(("content", "found"), [('{"a": 1}', {"a": 1}), ("[1]", {}), ('{"a', {}), (None, {})])
def test_small_files_of_json(tmp_path: Path, content: str | None, found: dict[str, int]) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    assert read_json_object(tmp_path / "x.json") == found
