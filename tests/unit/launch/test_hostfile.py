"""Hostfiles and filters: what is read, and what is refused with which place."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from neox.errors import ConfigError
from neox.launch.hosts.hostfile import check_host_name, read_hostfile, select_hosts
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
    ("text", "place"),
    [
        ("a slots=2\nb slots=2\na slots=4\n", "hostfile:3: host a is on line 1"),
        ("a\n", "hostfile:1"),
        ("a slots=two\n", "hostfile:1"),
        ("a slots=2 max=3\n", "hostfile:1"),
        ("a slots=2 slots=3\n", "hostfile:1"),
        ("a slots=8 max_slots=4\n", "hostfile:1"),
        ("a slots=2 max_slots=many\n", "hostfile:1"),
        ("a slots=2 gpu\n", "hostfile:1"),
        ("a slots=2 username=x;y\n", "hostfile:1"),
        ("a:2:3\n", "hostfile:1"),
        ("fe80::1%eth0 slots=2\n", "hostfile:1"),
        ("b slots=1\na slots=0\n", "hostfile:2"),
        ("", "hostfile"),
        ("# nobody\n", "hostfile"),
        ("$(reboot) slots=2\n", "hostfile:1"),
        ("a;reboot slots=2\n", "hostfile:1"),
        ("`id` slots=2\n", "hostfile:1"),
        ("-oProxyCommand=id slots=2\n", "hostfile:1"),
        ("a,b slots=2\n", "hostfile:1"),
        ("a[1-9] slots=2\n", "hostfile:1"),
        ("^file slots=2\n", "hostfile:1"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_hostfile(hostfile(tmp_path, text))
    assert place in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary", "a\0b"):
        with pytest.raises(ConfigError) as error:
            read_hostfile(path)
        assert str(path) in str(error.value)


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
    ("choice", "keys"),
    [
        ({"include": "d"}, {"include"}),
        ({"exclude": "a@d"}, {"exclude"}),
        ({"include": "c:2"}, {"include"}),
        ({"include": "a:"}, {"include"}),
        ({"include": "a:1-2"}, {"include"}),
        ({"include": "a@a:1"}, {"include"}),
        ({"include": "a", "exclude": "b"}, {"include", "exclude"}),
        ({"include": "a", "num_gpus": 1}, {"num_nodes", "num_gpus"}),
        ({"exclude": "a@b@c"}, {"include", "exclude"}),
        ({"num_nodes": 4}, {"num_nodes"}),
        ({"num_gpus": 3}, {"num_gpus"}),
    ],
)
def test_selections_that_are_refused(choice: dict[str, Any], keys: set[str]) -> None:
    with pytest.raises(ConfigError) as error:
        select_hosts(HOSTS, **choice)
    (problem,) = error.value.problems
    assert set(problem.keys) == keys


def test_spare_hosts_stay_behind_the_others_and_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("a slots=2 spare\nb slots=2\nc slots=2\n")
    hosts = read_hostfile(path)
    chosen = select_hosts(hosts, num_nodes=1, num_gpus=1)
    assert [(host.name, host.slots, host.spare) for host in chosen] == [("b", (0,), False), ("a", (0,), True)]
    assert [host.name for host in select_hosts(hosts, exclude="a@c:0")] == ["b", "c"]
    with pytest.raises(ConfigError):
        select_hosts(hosts, include="a")
    path.write_text("a slots=2 spare\n")
    with pytest.raises(ConfigError, match="only spare"):
        read_hostfile(path)
