"""The page of tools/status.py in a real browser: what it shows of a run, and that it updates by itself."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

if shutil.which("chromedriver") is None:
    pytest.skip("chromedriver (Debian: chromium-driver) is not installed", allow_module_level=True)

from tests.end_to_end.browser import Page, browser, wait
from tests.unit.launch.test_run_status import end, write_run
from tests.unit.tools.sweep.test_progress import END, STEPS, sweep_in, trained

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def shown(directory, tmp_path):
    """The page of tools/status.py for a directory."""
    command = [sys.executable, str(ROOT / "tools" / "status.py"), str(directory), "--serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = re.match(r"http://127\.0\.0\.1:\d+/", server.stdout.readline()).group()
        with browser(tmp_path) as session:
            yield Page(session, address)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130), os.getpid()


def test_the_page_shows_a_run_and_its_end(tmp_path):
    run = write_run(tmp_path / "run")
    with shown(run, tmp_path) as page:
        wait(lambda: page.text("#state") == "running")
        assert page.text("#step") == "30 of 60"
        assert page.text("#loss") == "6.0000"
        assert page.text("#speed") == "2.00 s a step, 500 tokens/s"
        assert page.texts("#hosts tr td:first-child") == ["worker-0", "worker-1"]
        assert page.texts("table:has(#hosts) th") == ["host", "printed", "speed", ""]  # no process ids, no column
        assert page.texts("#interruptions td")[1:3] == ["20", "rank 1 was killed"]
        assert len(page.texts("#picture .interruption")) == 1
        assert len(page.texts("#picture .curve")) == 1
        with open(run / "events.jsonl", "a") as file:
            file.write(json.dumps(end("rank failed", 1, cause="out of luck")) + "\n")
        wait(lambda: page.text("#state") == "failed")
        assert page.text("#reason") == "out of luck"


def test_the_page_shows_a_sweep_and_a_run_that_ends(tmp_path):
    sweep = tmp_path / "lr"
    sweep.mkdir()
    sweep_in(sweep, "ab")
    trained(sweep / "a", 4, 3.0)
    with shown(sweep, tmp_path) as page:
        wait(lambda: page.text("#counts") == "1 waiting, 1 in training")
        assert page.texts("#runs tr:first-child td")[:3] == ["a", "running", "4 of 10"]
        assert page.text("#best") == ""
        trained(sweep / "a", STEPS, 2.0, **END, kind="finished", status=0)
        wait(lambda: page.text("#counts") == "1 waiting, 1 done")
        assert page.text("#best") == "a: validation/lm_loss 2.0000 at step 10"
