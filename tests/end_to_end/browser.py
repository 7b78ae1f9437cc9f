"""A real browser for tests: Debian's chromium, driven over WebDriver."""

import json
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(method, url, body=None):
    """Send a WebDriver command and return its value."""
    data = None if method != "POST" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


def wait(condition, seconds=60):
    """Return the first true value of `condition()`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("nothing happened in time")


@contextmanager
def browser(tmp_path):
    """Start chromium; yield the address of its session."""
    port = free_port()
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: call("GET", f"http://127.0.0.1:{port}/status")["ready"])
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"goog:chromeOptions": {"args": [*arguments, f"--user-data-dir={tmp_path / 'profile'}"]}}
        session = call("POST", f"http://127.0.0.1:{port}/session", {"capabilities": {"alwaysMatch": options}})
        address = f"http://127.0.0.1:{port}/session/{session['sessionId']}"
        try:
            yield address
        finally:
            call("DELETE", address)
    finally:
        driver.terminate()
        driver.wait()
