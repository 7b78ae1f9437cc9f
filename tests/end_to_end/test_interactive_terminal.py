"""The prompt loop of tools/generate.py at a real terminal: history, streaming, kind answers, and its ends."""

import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("readline", reason="this Python has no readline, and so no history at the prompt")

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NAME = "v2_pp2_mp1_dp1_fp32"
PROMPT = ">>> "
UP = "\x1b[A"


class Terminal:
    """A program at the other end of a pseudo-terminal. shown: everything it wrote so far."""

    def __init__(self, *command):
        self.shown = ""
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            os.chdir(GOLDEN)
            os.execve(command[0], command, {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"})

    def read(self, seconds):
        """Read what is there; return whether the program still runs."""
        if not select.select([self.end], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.end, 65536)
        except OSError:  # Linux's way to say that nobody holds the other end
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, pattern, seconds=60):
        """Return what came before a pattern, and forget both."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            assert self.read(0.1), self.shown
            assert time.monotonic() < end, self.shown
        before, self.shown = self.shown[: found.start()], self.shown[found.end() :]
        return before

    def type(self, text):
        os.write(self.end, text.encode())

    def leave(self):
        """Return the exit status, once the program has ended."""
        while self.read(1):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def open_prompt(*command, **keys):
    keys = {"load": NAME, "master_port": "null", "text_gen_type": "interactive", "maximum_tokens": 100, **keys}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = command or (str(ROOT / "tools" / "generate.py"),)
    terminal = Terminal(sys.executable, *command, f"{NAME}/{NAME}.yml", *settings)
    terminal.wait_for(PROMPT)
    return terminal


def test_a_conversation():
    terminal = open_prompt()
    terminal.type("def main(\n")
    terminal.wait_for(r"\[[\d,.]+ tokens/s\]")
    terminal.wait_for(PROMPT)
    terminal.type("\n")
    terminal.wait_for(r"\[[\d,.]+ tokens/s\]")
    terminal.wait_for(PROMPT)
    terminal.type("word " * 200 + "\n")
    terminal.wait_for(r"the prompt has \d+ tokens, and this model's context is 128")
    terminal.wait_for(PROMPT)
    terminal.type(UP + UP + "\n")
    again = terminal.wait_for(r"\[[\d,.]+ tokens/s\]")
    assert "def main(" in again, "the prompt before the last was not brought back"
    terminal.wait_for(PROMPT)
    terminal.type("stop\n")
    assert terminal.leave() == 0


@pytest.mark.slow
def test_ctrl_c_ends_it_in_the_middle_of_an_answer():
    terminal = open_prompt(max_position_embeddings=100000, maximum_tokens=90000, minimum_tokens=90000)
    terminal.type("def main(\n")
    terminal.wait_for(r"main\(\r\n.")  # the first token is shown before the last is known
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert terminal.leave() == 130
    assert "Traceback" not in terminal.shown


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return path


def hold_conversation(terminal):
    """Ask, stop the answer, stop nothing, ask again, and leave with Ctrl-D."""
    terminal.type("def main(\n")
    terminal.wait_for(r"main\(\r\n.")
    terminal.type("\x03")
    terminal.wait_for(r"\(stopped\)")
    terminal.wait_for(PROMPT)
    time.sleep(1.2)  # two of them within a second end a run of deepy.py
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D ends")
    terminal.wait_for(PROMPT)
    terminal.type("/reset\n")
    terminal.wait_for("forgotten")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


LONG = {"max_position_embeddings": 100000, "maximum_tokens": 90000, "minimum_tokens": 90000, "text_gen_type": "chat"}


def test_ctrl_c_stops_an_answer_of_a_conversation_and_ctrl_d_ends_it(template):
    hold_conversation(open_prompt(chat_template=template, **LONG))


@pytest.mark.slow
def test_a_conversation_over_two_ranks(template, tmp_path):
    keys = {**LONG, "num_gpus": 2, "log_dir": tmp_path / "logs", "save": tmp_path / "save"}
    hold_conversation(open_prompt(str(ROOT / "deepy.py"), "generate.py", chat_template=template, **keys))
