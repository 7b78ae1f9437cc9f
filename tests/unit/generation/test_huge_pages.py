"""Moving memory to huge pages keeps what is in it, and is no error where it cannot be."""

import sys
from pathlib import Path

import pytest
import torch

from neox.generation.huge_pages import use_huge_pages


def test_contents_stay():
    x = torch.arange(2**21 + 5)  # 16 MiB and a bit
    use_huge_pages(x.data_ptr(), x.nbytes)  # done or not, as the system has it
    assert torch.equal(x, torch.arange(2**21 + 5))


def test_less_than_a_page_is_left_alone():
    x = torch.ones(1000)
    assert not use_huge_pages(x.data_ptr(), x.nbytes)


def test_memory_that_is_not_there_is_refused_by_the_system():
    assert not use_huge_pages(2**46, 2**23)


def test_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    x = torch.ones(2**22)
    assert not use_huge_pages(x.data_ptr(), x.nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_become_huge_where_the_system_can():
    x = torch.ones(2**22)  # 16 MiB
    if not use_huge_pages(x.data_ptr(), x.nbytes):
        pytest.skip("this system moves nothing to huge pages")
    huge = sum(
        int(line.split()[1])
        for line in Path("/proc/self/smaps").read_text().splitlines()
        if line.startswith("AnonHugePages")
    )
    assert huge >= 12 * 1024  # KiB
