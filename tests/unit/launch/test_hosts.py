"""Hostfiles and filters: what is read, what is refused, and where the message points."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from neox.errors import ConfigError
from neox.launch.hosts import check_host_name, read_hostfile, select_hosts
from neox.launch.spec import Host

HOSTS = (Host("a", (0, 1, 2, 3)), Host("b", (0, 1, 2, 3)), Host("c", (0, 1)))


def hostfile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hostfile"
    path.write_bytes(text.encode())
    return path


def test_slots_comments_blank_lines_and_crlf(tmp_path: Path) -> None:
    text = "# the cluster\r\n\r\nworker-0 slots=8 # first\r\n  root@10.0.0.2\tslots = 4\r\n"
    hosts = read_hostfile(hostfile(tmp_path, "\ufeff" + text))
    assert [(host.name, len(host.slots)) for host in hosts] == [("worker-0", 8), ("root@10.0.0.2", 4)]


def test_the_old_spelling_works_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_hostfile(hostfile(tmp_path, "a slot=16\n")) == (Host("a", tuple(range(16))),)
    assert "hostfile:1" in caplog.text
    assert "slot=" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=2\nb slots=2\na slots=4\n", "hostfile:3: host a is on line 1 already"),
        ("a\n", "hostfile:1: expected `host slots=N`"),
        ("a slots=two\n", "hostfile:1"),
        ("a slots=2 max=3\n", "hostfile:1"),
        ("a slots=0\n", "no slots"),
        ("", "names no host"),
        ("# nobody\n", "names no host"),
        ("$(reboot) slots=2\n", "not a host name"),
        ("a;reboot slots=2\n", "not a host name"),
        ("`id` slots=2\n", "not a host name"),
        ("-oProxyCommand=id slots=2\n", "not a host name"),
        ("a,b slots=2\n", "not a host name"),
        ("a[1-9] slots=2\n", "not a host name"),
        ("^file slots=2\n", "not a host name"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_hostfile(hostfile(tmp_path, text))
    assert words in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile("a\0b")


def test_host_names() -> None:
    for name in ("gpu01", "user@gpu01.example.org", "10.0.0.1", "node_7", "x"):
        assert check_host_name(name, "here") == name
    for name in ("", "-x", "a b", "a\nb", "a'b", 'a"b', "a%h", "exec:a", "@a", "a@", "a/b"):
        with pytest.raises(ConfigError):
            check_host_name(name, "here")


def test_selections() -> None:
    assert select_hosts(HOSTS) == HOSTS
    assert select_hosts(HOSTS, num_nodes=2) == HOSTS[:2]
    assert select_hosts(HOSTS, num_gpus=2) == tuple(Host(name, (0, 1)) for name in "abc")
    assert select_hosts(HOSTS, include="b:0,2@a") == (HOSTS[0], Host("b", (0, 2)))  # the hostfile's order
    assert select_hosts(HOSTS, exclude="a@b:1") == (Host("b", (0, 2, 3)), HOSTS[2])
    assert select_hosts(HOSTS, exclude="c:0,1") == HOSTS[:2]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"include": "d"}, "'d', which is not in the hostfile"),
        ({"include": "c:2"}, "host c has 2 slots, so no slot 2"),
        ({"include": "a:"}, "not a list of slots"),
        ({"include": "a:1-2"}, "not a list of slots"),
        ({"include": "a@a:1"}, "twice"),
        ({"include": "a", "exclude": "b"}, "one of them"),
        ({"include": "a", "num_gpus": 1}, "take num_nodes and num_gpus out"),
        ({"exclude": "a@b@c"}, "no host is left"),
        ({"num_nodes": 4}, "only 3 hosts"),
        ({"num_gpus": 3}, "host c has only 2 slots"),
    ],
)
def test_selections_that_are_refused(choice: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        select_hosts(HOSTS, **choice)  # type: ignore[arg-type]
    assert words in str(error.value)
