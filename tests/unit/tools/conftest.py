"""Tools run inside the test's process: as commands they would each import torch anew, for seconds."""

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.log_settings import restored_log_settings

TOOLS = Path(__file__).parents[3] / "tools"
sys.path.insert(0, str(TOOLS))
__import__("_checkout")  # which takes the folder of the tools from the path again

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run `tools/NAME` with arguments, and return its exit status and output as `subprocess.run` does."""

    def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(TOOLS / name), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(command[0], run_name="__main__")
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(command, int(ended.value.code or 0), shown.out, shown.err)

    with restored_log_settings():
        yield run_tool
