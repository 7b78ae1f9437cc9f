"""tools/serve.py as a process: its address, its end."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (requirements/requirements-serve.txt) is not installed")

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NAME = "v2_pp2_mp1_dp1_fp32"


def serve(log, port):
    settings = ("--set", f"load={NAME}", "--set", "max_position_embeddings=100000", "--max_tokens", "90000")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "serve.py"), f"{NAME}/{NAME}.yml", "--port", str(port), *settings],
        cwd=GOLDEN,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=log.open("w"),
    )


def test_a_taken_port_is_said_before_loading_and_a_signal_ends_a_long_answer(tmp_path):
    log = tmp_path / "log"
    server = serve(log, 0)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/ serves", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        port = int(found[1])
        second = serve(tmp_path / "second", port)
        assert second.wait(60) == 1
        said = (tmp_path / "second").read_text()
        assert f"--port {port}: cannot listen" in said
        assert "weights of" not in said

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": "def", "max_tokens": 90000, "min_tokens": 90000, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        assert time.monotonic() - started < 20
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()
