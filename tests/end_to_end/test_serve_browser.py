"""The page of tools/serve.py in a real browser: Debian's chromium, driven over WebDriver."""

import json
import shutil
import threading
import time
import urllib.request

import pytest

from tests.unit.generation.toy import ToyCodec, ToyModel, next_letter

pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (requirements/requirements-serve.txt) is not installed")
if shutil.which("chromedriver") is None:
    pytest.skip("chromedriver (Debian: chromium-driver) is not installed", allow_module_level=True)

from neox.generation.server import make_app
from tests.end_to_end.browser import browser, call, wait
from tests.unit.generation.served import served

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which WebDriver names elements


def test_text_comes_into_the_page_and_stops_when_told(tmp_path):
    slow = threading.Event()

    def rule(ids):
        if slow.is_set():
            time.sleep(0.02)
            return next_letter([1])
        return next_letter(ids)

    app = make_app(ToyModel(rule, max_length=2000), ToyCodec(), name="toy")
    with served(app) as address, browser(tmp_path) as session:

        def find(selector):
            found = call("POST", f"{session}/element", {"using": "css selector", "value": selector})
            return f"{session}/element/{found[ELEMENT]}"

        def text(selector):
            return call("GET", find(selector) + "/text")

        def fill(selector, value):
            call("POST", find(selector) + "/clear")
            call("POST", find(selector) + "/value", {"text": value})

        call("POST", f"{session}/url", {"url": address})
        fill("#prompt", "abc")
        fill("#max_tokens", "4")
        fill("#temperature", "0")
        call("POST", find("#go") + "/click")
        wait(lambda: text("#status") == "ended: length")
        assert text("#out") == "abcdefg"
        wait(lambda: text("#settings").startswith("4 tokens in "))
        assert text("#settings").endswith("tokens/s; max_tokens 4, temperature 0, top_p 0.95, top_k 0")
        wait(lambda: text("#model") == "toy, 2000 tokens of context")

        fill("#max_tokens", "9999")
        call("POST", find("#go") + "/click")
        wait(lambda: "`max_tokens` must be an integer from 1 to 1024" in text("#status"))

        slow.set()
        fill("#max_tokens", "1000")
        call("POST", find("#go") + "/click")
        wait(lambda: len(text("#out")) > 8)
        call("POST", find("#stop") + "/click")
        wait(lambda: text("#status") == "stopped")
        assert text("#out").startswith("abcbbbb")
        health = f"{address}health"
        wait(lambda: json.load(urllib.request.urlopen(health, timeout=9)) == {"status": "ok", "waiting": 0})
