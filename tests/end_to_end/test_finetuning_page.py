"""docs/finetuning.md: its files are written, and its commands run one after another, as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> list[tuple[str, str]]:
    """The page's blocks of code in order: (language, text)."""
    page = (ROOT / "docs" / "finetuning.md").read_text()
    return re.findall(r"```(bash|python|yaml|jinja)\n(.*?)```", page, re.DOTALL)


def run(directory: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)  # nearly twenty commands, each with a limit of its own
def test_every_command_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft (requirements/requirements-dev.txt) is not installed")
    documents = [
        f'{{"text": "Document {n} says that {n} and {n + 1} make {2 * n + 1}, not {n}."}}\n' for n in range(400)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.jsonl").write_text("".join(documents))
    chats = [
        f'{{"messages": [{{"role": "user", "content": "{n} + 1?"}}, {{"role": "assistant", "content": "{n + 1}"}}]}}\n'
        for n in range(40)
    ]
    (tmp_path / "data" / "chats.jsonl").write_text("".join(chats))
    said = []
    for language, text in blocks():
        if language in ("yaml", "jinja"):
            (tmp_path / text.split()[1]).write_text(text)
        elif language == "python":
            said.append(run(tmp_path, "-c", text))
        else:
            for line in text.splitlines():
                python, script, *arguments = shlex.split(line)
                assert python == "python"
                said.append(run(tmp_path, str(ROOT / script), *arguments))
    whole = "\n".join(said)
    assert whole.count("runs/own/global_step10, 10 steps") >= 2  # text and export
    assert "parameters are trained" in whole
    assert "\n+  1<|endoftext|>" in whole
    for made in ("own-model/model.safetensors", "lora-model/model.safetensors", "lora-adapter/adapter_config.json"):
        assert (tmp_path / made).is_file()
    assert (tmp_path / "runs" / "own" / "latest").read_text() == "global_step10"
    assert (tmp_path / "runs" / "chat" / "latest").read_text() == "global_step10"
    assert (tmp_path / "runs" / "chat" / "global_step10" / "chat_template.json").is_file()
    assert (tmp_path / "runs" / "more" / "latest").read_text() == "global_step2"
