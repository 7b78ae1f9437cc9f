"""The memory of this machine's GPUs, as a stand-in for nvidia-smi tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.launch.accelerators import smallest_memory


@pytest.mark.parametrize(
    ("says", "expected"),
    [("81559\\n40960\\n", 40960 * 2**20), ("[N/A]\\n", None), ("", None)],
)
def test_smallest_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, expected: int | None) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert smallest_memory() == expected


def test_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert smallest_memory() is None
