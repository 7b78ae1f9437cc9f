"""Commit, `latest`, finding the newest complete checkpoint, and everything that can be wrong with a directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

from neox.checkpoint import (
    CheckpointReader,
    check_manifest,
    checkpoint_directories,
    commit,
    find_checkpoint,
    keep_last,
    layer_file,
    read_manifest,
    record_share,
    stage_directory,
    staging_path,
    supersede_all,
    why_incomplete,
)
from neox.checkpoint.save_directory import staging as staging_module
from neox.errors import CheckpointError
from tests.errors import raises_naming
from tests.unit.checkpoint.synthetic import seeded_weights, small_plan, write_checkpoint

LAYERS = small_plan(num_layers=1)


@pytest.fixture(autouse=True)
def _propagate(caplog):
    caplog.set_level(logging.INFO, logger="neox")
    logging.getLogger("neox").propagate = True


def save(directory: Path, iteration: int) -> Path:
    staged = stage_directory(directory, iteration)
    assert staged == staging_path(directory, iteration)
    write_checkpoint(staged, LAYERS, seeded_weights(LAYERS, seed=iteration), client_state={"iteration": iteration})
    return commit(staged)


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def test_a_commit_is_whole_and_named_in_latest(tmp_path, caplog):
    for iteration in (10, 20):
        path = save(tmp_path, iteration)
        assert path == tmp_path / f"global_step{iteration}"
        assert (tmp_path / "latest").read_text() == path.name
        assert check_manifest(path, read_manifest(path)) == []
    assert find_checkpoint(tmp_path) == tmp_path / "global_step20"
    assert find_checkpoint(tmp_path, 10) == tmp_path / "global_step10"
    assert find_checkpoint(tmp_path / "global_step10") == tmp_path / "global_step10"
    assert CheckpointReader(path, LAYERS).iteration == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step10", "global_step20", "latest"]
    assert str(tmp_path / "global_step20") in caplog.text


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "global_step10" / "old").write_text("x")
    save(tmp_path, 10)
    assert not (tmp_path / "global_step10" / "old").exists()
    assert find_checkpoint(tmp_path).name == "global_step10"


def test_300_flipped_bits_are_found(tmp_path):
    path = save(tmp_path, 10)
    files = sorted(p for p in path.iterdir() if p.name != "manifest.json")
    manifest = read_manifest(path)
    generator = random.Random(0)
    for _ in range(300):
        file = generator.choice(files)
        bit = generator.randrange(8 * file.stat().st_size)
        flip_bit(file, bit)
        [problem] = check_manifest(path, manifest)
        assert file.name in problem
        assert "sha256" in problem
        flip_bit(file, bit)
    assert check_manifest(path, manifest) == []


def test_a_damaged_newest_gives_the_one_before_and_says_so(tmp_path, caplog):
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    target = newest / layer_file(0, 0)
    flip_bit(target, 9000)
    assert find_checkpoint(tmp_path) == tmp_path / "global_step10"
    assert target.name in caplog.text
    assert find_checkpoint(tmp_path, verify=False) == newest  # the user's own choice: sizes alone
    with raises_naming(CheckpointError, newest, target.name):
        find_checkpoint(tmp_path, 20)
    target.write_bytes(target.read_bytes()[:-1])
    assert find_checkpoint(tmp_path, verify=False) == tmp_path / "global_step10"
    target.unlink()
    caplog.clear()
    assert find_checkpoint(tmp_path) == tmp_path / "global_step10"
    assert target.name in caplog.text


def test_no_whole_checkpoint_is_an_error_with_every_reason(tmp_path):
    for iteration in (10, 20):
        (save(tmp_path, iteration) / layer_file(0, 0)).unlink()
    with pytest.raises(CheckpointError) as refused:
        find_checkpoint(tmp_path)
    _, *reasons, _ = str(refused.value).splitlines()
    assert [reason.split(":")[0].strip() for reason in reasons] == ["global_step20", "global_step10"]
    assert all(layer_file(0, 0) in reason for reason in reasons)
    with raises_naming(CheckpointError, "load", tmp_path / "nowhere"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        find_checkpoint(tmp_path / "empty")
    with raises_naming(CheckpointError, "iteration", "global_step30", "global_step20", "global_step10"):
        find_checkpoint(tmp_path, 30)


@pytest.mark.parametrize("latest", [None, "", "global_step99", "../elsewhere"])
def test_latest_missing_empty_or_wrong(tmp_path, caplog, latest):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert find_checkpoint(tmp_path) == tmp_path / "global_step20"
    assert str(tmp_path / "latest") in "".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")


def test_an_edited_latest_rolls_back(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "latest").write_text("global_step10\n")
    assert find_checkpoint(tmp_path) == tmp_path / "global_step10"
    save(tmp_path, 15)  # the run goes on from there; an older branch's step 20 must not win
    (tmp_path / "latest").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "global_step15"


@pytest.mark.parametrize("call", range(1, 12))
def test_killed_at_any_point_of_a_commit(tmp_path, monkeypatch, call):
    """Whatever of a save was done, the checkpoint before or the new one loads, and the next save works."""
    save(tmp_path, 10)
    staged = stage_directory(tmp_path, 20)
    write_checkpoint(staged, LAYERS, seeded_weights(LAYERS))
    calls = 0

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return wrapper

    for target, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (staging_module, "write_manifest")):
        monkeypatch.setattr(target, name, counted(getattr(target, name)))
    try:
        commit(staged)
    except KeyboardInterrupt:
        pass
    else:
        assert call > 10
    monkeypatch.undo()
    found = find_checkpoint(tmp_path)
    assert found.name in ("global_step10", "global_step20")
    assert (found.name == "global_step20") == (tmp_path / "global_step20").exists()
    assert save(tmp_path, 30) == find_checkpoint(tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_killed_while_replacing_keeps_the_old_one(tmp_path):
    final = save(tmp_path, 10)
    aside = tmp_path / ".replaced-global_step10"
    os.rename(final, aside)  # killed between the two renames
    assert checkpoint_directories(tmp_path) == [aside]
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, 10) == aside
    stage_directory(tmp_path, 20)
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path, 10) == final
    shutil.copytree(final, aside)  # killed after them
    assert checkpoint_directories(tmp_path) == [final]


def test_keep_last_never_deletes_the_last_good_one(tmp_path):
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration)
    assert [p.name for p in keep_last(tmp_path, 2)] == ["global_step20", "global_step10"]
    (tmp_path / "global_step40" / layer_file(0, 0)).unlink()
    assert keep_last(tmp_path, 1) == []  # only 30 is whole
    assert find_checkpoint(tmp_path).name == "global_step30"
    save(tmp_path, 50)
    (tmp_path / "latest").write_text("global_step30")
    assert [p.name for p in keep_last(tmp_path, 1)] == ["global_step40"]


def test_checkpoints_without_a_manifest_are_checked_by_their_archives(tmp_path):
    shutil.copytree(save(tmp_path, 10), tmp_path / "neox" / "global_step10")
    shutil.copytree(tmp_path / "global_step10", tmp_path / "neox" / "global_step20")
    for step in (10, 20):
        (tmp_path / "neox" / f"global_step{step}" / "manifest.json").unlink()
    (tmp_path / "neox" / "latest").write_text("global_step20")
    assert find_checkpoint(tmp_path / "neox").name == "global_step20"
    file = tmp_path / "neox" / "global_step20" / layer_file(0, 0)
    flip_bit(file, 8 * (file.stat().st_size // 2))
    assert "damaged" in why_incomplete(file.parent)[0]
    assert find_checkpoint(tmp_path / "neox").name == "global_step10"
    file.write_bytes(file.read_bytes()[:1000])
    assert find_checkpoint(tmp_path / "neox", verify=False).name == "global_step10"


def test_a_broken_manifest_is_not_whole(tmp_path):
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    for content in ("", "{", json.dumps({"version": 99, "files": {}}), "[]", '{"version": 1}'):
        (path / "manifest.json").write_text(content)
        assert find_checkpoint(tmp_path).name == "global_step10"


def test_a_directory_without_write_access(tmp_path):
    if os.geteuid() == 0:  # permissions do not stop root; /proc does
        tmp_path = Path("/proc/neox")
    else:
        tmp_path.chmod(0o500)
    with raises_naming(CheckpointError, "save", tmp_path):
        stage_directory(tmp_path, 10)


def test_a_save_directory_that_is_a_file(tmp_path):
    (tmp_path / "save").write_text("")
    with raises_naming(CheckpointError, "save", tmp_path / "save"):
        stage_directory(tmp_path / "save", 10)


def test_records_of_several_ranks_make_the_same_manifest(tmp_path):
    alone = read_manifest(save(tmp_path / "alone", 10))
    staged = stage_directory(tmp_path / "shared", 10)
    write_checkpoint(staged, LAYERS, seeded_weights(LAYERS, seed=10), client_state={"iteration": 10})
    shares = [record_share(staged, part, 3) for part in range(3)]
    assert sum(map(len, shares)) == len(alone.files)
    assert read_manifest(commit(staged, {**shares[0], **shares[1]})) == alone  # the third is hashed by commit


def test_a_commit_that_fails_takes_itself_back(tmp_path, monkeypatch):
    before = save(tmp_path, 10)
    staged = stage_directory(tmp_path, 10)
    write_checkpoint(staged, LAYERS, seeded_weights(LAYERS), client_state={"iteration": 10})
    rename = os.rename

    def full(source, target):
        if Path(source) == staged:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with raises_naming(CheckpointError, before, os.strerror(errno.ENOSPC)):
        commit(staged)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step10", "latest"]
    assert find_checkpoint(tmp_path) == before


@pytest.mark.parametrize("again", [False, True])
def test_a_commit_whose_latest_cannot_be_written_is_saved_and_says_so(tmp_path, monkeypatch, again):
    """After the rename the checkpoint is complete: the error must not read as if it had been lost."""
    save(tmp_path, 10)
    iteration = 10 if again else 20
    staged = stage_directory(tmp_path, iteration)
    write_checkpoint(staged, LAYERS, seeded_weights(LAYERS, seed=3), client_state={"iteration": iteration})
    (staged / "new").write_text("x")
    write_text = staging_module.write_text

    def full(path, text):
        if path.name == "latest":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_text(path, text)

    monkeypatch.setattr(staging_module, "write_text", full)
    with raises_naming(CheckpointError, tmp_path / f"global_step{iteration}", "is saved", tmp_path / "latest"):
        commit(staged)
    monkeypatch.undo()
    found = find_checkpoint(tmp_path)
    assert found == tmp_path / f"global_step{iteration}"
    assert (found / "new").exists()
    assert save(tmp_path, 30) == find_checkpoint(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_nothing(tmp_path, monkeypatch, caplog):
    """prime-rl PR 1763, NeMo Speech PR 12804, transformers#20988: busy on NFS, a mount, a link elsewhere."""
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration)
    elsewhere = tmp_path.with_name("slow")
    (tmp_path / "global_step10").rename(elsewhere)
    (tmp_path / "global_step10").symlink_to(elsewhere)
    remove, rename = shutil.rmtree, os.rename

    def busy(function, *names):
        def refusing(path, *others, **options):
            if any(name in str(path) for name in names):
                raise OSError(errno.EBUSY, "Device or resource busy", str(path))
            return function(path, *others, **options)

        return refusing

    monkeypatch.setattr(shutil, "rmtree", busy(remove, "global_step20"))  # after it has got another name
    monkeypatch.setattr(os, "rename", busy(rename, "global_step30"))  # a mount point
    assert [path.name for path in keep_last(tmp_path, 1)] == ["global_step20"]
    for name in ("global_step10", ".deleted-global_step20", "global_step30"):
        assert any(name in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert save(tmp_path, 50) == find_checkpoint(tmp_path)  # the next start's first save
    assert layer_file(0, 0) in os.listdir(elsewhere)
    save(tmp_path, 20)
    save(tmp_path, 50)
    assert [path.name for path in keep_last(tmp_path, 1)] == ["global_step40", "global_step20"]  # its name was taken

    moved = supersede_all(tmp_path)
    assert {path.name for path in moved} == {"global_step10", "global_step50"}
    assert (tmp_path / "global_step30").is_dir()
    monkeypatch.undo()
    (tmp_path / ".deleted-global_step9").symlink_to(elsewhere)  # as versions before 0.3 left a link
    assert save(tmp_path, 60) == find_checkpoint(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert layer_file(0, 0) in os.listdir(elsewhere)
