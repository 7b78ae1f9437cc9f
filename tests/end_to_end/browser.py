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


class Page:
    """A page in a session of a browser; elements are named by CSS selectors."""

    element = "element-6066-11e4-a52e-4f735466cecf"  # the key under which WebDriver names elements

    def __init__(self, session, address):
        self.session = session
        call("POST", f"{session}/url", {"url": address})

    def find(self, selector):
        found = call("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        return f"{self.session}/element/{found[self.element]}"

    def text(self, selector):
        return call("GET", self.find(selector) + "/text")

    def texts(self, selector):
        """Return the texts of all elements, in order."""
        found = call("POST", f"{self.session}/elements", {"using": "css selector", "value": selector})
        return [call("GET", f"{self.session}/element/{each[self.element]}/text") for each in found]

    def fill(self, selector, value):
        call("POST", self.find(selector) + "/clear")
        self.type(selector, value)

    def type(self, selector, value):
        call("POST", self.find(selector) + "/value", {"text": value})

    def click(self, selector):
        call("POST", self.find(selector) + "/click")

    def shows(self, selector):
        return call("GET", self.find(selector) + "/displayed")
